#include "comm/nccl/card.h"

#include <ATen/ops/empty.h>

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
  if (a.ends != 0) return {};
  std::string mismatch = describe_mismatch(rank_a, a.request, rank_b, b.request);
  // Nothing that was issued can be put behind what was not.
  if (mismatch.empty() && (a.num_issued > b.num_ready || b.num_issued > a.num_ready)) {
    const auto describe_queue = [](int rank, const Card& card) {
      return describe_place(rank, card) + ", where " + std::to_string(card.num_issued) +
             " buckets of gradients had left and " + std::to_string(card.num_ready) + " could have";
    };
    return "ranks disagree: " + describe_queue(rank_a, a) + "; " + describe_queue(rank_b, b) +
           ". A collective that backward alone has, or that only some steps have there, must come at the same place of "
           "backward on all ranks; call it in forward";
  }
  return mismatch;
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

std::string find_mismatch(const Cards& cards) {
  for (size_t a = 0; a < cards.size(); ++a) {
    const auto& first = cards[a];
    if (!first) continue;
    for (size_t b = a + 1; b < cards.size(); ++b) {
      const auto& second = cards[b];
      if (!second) continue;
      std::string mismatch = mismatch_of(static_cast<int>(a), *first, static_cast<int>(b), *second);
      if (!mismatch.empty()) return mismatch;
    }
  }
  return {};
}

}  // namespace muster::comm::nccl
