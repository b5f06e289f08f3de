#include "comm/nccl/card.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace muster::comm::nccl {
namespace {

constexpr int64_t kNumel = sizeof(Card) / sizeof(int64_t);

constexpr const char* kRemedy =
    ". Every rank must issue the same collectives in the same order; look for code that depends on the rank, or models "
    "and data that differ between ranks";

std::string describe_place(int rank, const Card& card) {
  const std::string who = "rank " + std::to_string(rank);
  const std::string number = std::to_string(card.number);
  if (card.ends != 0) return who + " ended the step after " + number + " collectives";
  return who + " asked for " + describe(card.request) + " after " + number + " collectives of the step";
}

std::string mismatch_of(int rank_a, const Card& a, int rank_b, const Card& b) {
  if (a.ends != b.ends || a.number != b.number) {
    return "ranks disagree: " + describe_place(rank_a, a) + ", " + describe_place(rank_b, b) + kRemedy;
  }
  return a.ends != 0 ? std::string() : describe_mismatch(rank_a, a.request, rank_b, b.request);
}

// Of ranks that ask for the same. Nothing that was issued can be put behind what was not.
std::string queue_mismatch_of(int rank_a, const Card& a, int rank_b, const Card& b) {
  const auto describe_queue = [](int rank, const Card& card) {
    return describe_place(rank, card) + ", where " + std::to_string(card.num_issued) +
           " buckets of gradients had left and " + std::to_string(card.num_ready) + " could have";
  };
  return "ranks disagree: " + describe_queue(rank_a, a) + "; " + describe_queue(rank_b, b) +
         ". A collective that backward alone has, or that only some steps have there, must come at the same place of "
         "backward on all ranks; call it in forward";
}

}  // namespace

at::Tensor to_tensor(const Card& card) {
  at::Tensor tensor = at::empty({kNumel}, at::kLong);
  std::memcpy(tensor.mutable_data_ptr(), &card, sizeof(Card));
  return tensor;
}

Card card_in(const at::Tensor& tensor) {
  Card card;
  std::memcpy(&card, tensor.const_data_ptr(), sizeof(Card));
  return card;
}

int64_t least_ready(const Cards& cards) {
  int64_t least = INT64_MAX;
  for (const auto& card : cards) least = card ? std::min(least, card->num_ready) : least;
  return least;
}

int64_t most_issued(const Cards& cards) {
  int64_t most = 0;
  for (const auto& card : cards) most = card ? std::max(most, card->num_issued) : most;
  return most;
}

std::string find_mismatch(const Cards& cards) {
  const auto rank_of = [&](const auto& wanted) {
    const auto found =
        std::find_if(cards.begin(), cards.end(), [&](const auto& card) { return card && wanted(*card); });
    return static_cast<int>(found - cards.begin());
  };
  const auto at = [&](int rank) { return cards[static_cast<size_t>(rank)].value_or(Card()); };
  const int first = rank_of([](const Card&) { return true; });
  const int size = static_cast<int>(cards.size());
  if (first == size) return {};
  const Card own = at(first);
  for (int r = first + 1; r < size; ++r) {
    const auto& other = cards[static_cast<size_t>(r)];
    std::string mismatch = other ? mismatch_of(first, own, r, *other) : std::string();
    if (!mismatch.empty()) return mismatch;
  }
  const int64_t issued = most_issued(cards);
  const int64_t ready = least_ready(cards);
  if (own.ends != 0 || issued <= ready) return {};
  const auto [a, b] = std::minmax({rank_of([&](const Card& card) { return card.num_issued == issued; }),
                                   rank_of([&](const Card& card) { return card.num_ready == ready; })});
  return queue_mismatch_of(a, at(a), b, at(b));
}

}  // namespace muster::comm::nccl
