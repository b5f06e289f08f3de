#include "server/shard/dealer.h"

#include <algorithm>
#include <functional>
#include <string>

#include "muster/error.h"

namespace muster::server {

Dealer::Pass& Dealer::pass_of(const Deal& request) {
  const std::pair key(request.loader, request.epoch);
  auto found = passes_.find(key);
  if (found == passes_.end()) {
    if (passes_.size() >= kMaxPasses) {
      std::erase_if(passes_, [](const auto& entry) {
        const auto& pass = entry.second;
        return pass.next >= pass.batches && pass.held.empty() && pass.returned.empty();
      });
    }
    if (passes_.size() >= kMaxPasses) {
      throw InvalidArgument("more than " + std::to_string(kMaxPasses) +
                            " passes over loaders are under way; finish some before beginning others");
    }
    if (newest_.size() >= kMaxLoaders && !newest_.contains(request.loader)) {
      throw InvalidArgument("servers deal from more than " + std::to_string(kMaxLoaders) + " loaders; prepare fewer");
    }
    auto& newest = newest_[request.loader];
    newest = std::max(newest, request.epoch);
    found = passes_.emplace(key, Pass{request.batches, 0, {}, {}}).first;
  }
  auto& pass = found->second;
  if (pass.batches == 0 && pass.next <= request.batches) pass.batches = request.batches;
  if (pass.batches == request.batches) return pass;
  throw LayoutMismatch("a worker's loader " + std::to_string(request.loader) + " has " +
                       std::to_string(request.batches) + " batches, another's, or that of the checkpoint, " +
                       (pass.batches == 0 ? "at least " + std::to_string(pass.next) : std::to_string(pass.batches)) +
                       "; give all workers the same data, in batches of the same size");
}

Dealt Dealer::deal(uint32_t rank, uint64_t incarnation, const Deal& request) {
  auto& last = last_[rank];
  if (last.incarnation == incarnation && request.request <= last.request) return last.answer;  // one that came late
  auto& pass = pass_of(request);
  for (const uint64_t batch : request.finished) finish(pass, rank, batch);
  Dealt dealt;
  if (request.ends) {
    take_back(pass, rank);
    dealt.state = Dealt::State::ended;
  } else if (!pass.returned.empty()) {
    dealt = {Dealt::State::dealt, *pass.returned.begin()};
    pass.returned.erase(pass.returned.begin());
  } else if (pass.next < pass.batches) {
    dealt = {Dealt::State::dealt, pass.next++};
  } else {
    dealt.state = pass.held.empty() ? Dealt::State::ended : Dealt::State::none;
  }
  if (dealt.state == Dealt::State::dealt) pass.held[dealt.batch] = rank;
  last = {incarnation, request.request, dealt};
  return dealt;
}

void Dealer::finish(uint32_t rank, const std::vector<BatchId>& batches) {
  for (const auto& batch : batches) {
    const auto pass = passes_.find({batch.loader, batch.epoch});
    if (pass != passes_.end()) finish(pass->second, rank, batch.batch);
  }
}

void Dealer::finish(Pass& pass, uint32_t rank, uint64_t batch) {
  const auto held = pass.held.find(batch);
  if (held != pass.held.end() && held->second == rank) pass.held.erase(held);
}

void Dealer::take_back(uint32_t rank) {
  for (auto& [key, pass] : passes_) take_back(pass, rank);
}

void Dealer::take_back(Pass& pass, uint32_t rank) {
  std::erase_if(pass.held, [&](const auto& held) {
    if (held.second == rank) pass.returned.insert(held.first);
    return held.second == rank;
  });
}

void Dealer::take_out(Pass& pass, uint64_t batch) {
  for (; pass.next <= batch; ++pass.next) pass.returned.insert(pass.next);
  pass.returned.erase(batch);
  pass.held.erase(batch);
}

void Dealer::put_right(uint32_t rank, const std::vector<BatchId>& held, const std::vector<BatchId>& finished) {
  take_back(rank);
  last_.erase(rank);  // an answer that it does not hold did not come, and its batch is to be dealt again
  const auto pass_of_batch = [&](const BatchId& batch) -> Pass* {
    const std::pair key(batch.loader, batch.epoch);
    const bool has_room = passes_.size() < kMaxPasses && newest_.size() < kMaxLoaders;
    const auto found = passes_.find(key);
    const uint64_t next = found == passes_.end() ? 0 : found->second.next;
    const bool is_near = batch.batch < next || batch.batch - next < kMaxNumbers;  // every one between is noted, too
    if (!is_near || (found == passes_.end() && !has_room)) return nullptr;
    auto& newest = newest_[batch.loader];
    newest = std::max(newest, batch.epoch);
    return &passes_[key];
  };
  for (const auto& batch : finished) {
    if (auto* const pass = pass_of_batch(batch)) take_out(*pass, batch.batch);
  }
  for (const auto& batch : held) {
    auto* const pass = pass_of_batch(batch);
    if (pass == nullptr) continue;
    take_out(*pass, batch.batch);
    pass->held[batch.batch] = rank;
  }
}

std::vector<PassId> Dealer::newest() const {
  std::vector<PassId> newest;
  for (const auto& [loader, epoch] : newest_) newest.push_back({loader, epoch});
  return newest;
}

std::vector<PassProgress> Dealer::progress() const {
  std::vector<PassProgress> all;
  for (const auto& [key, pass] : passes_) {
    auto undone = pass.returned;
    for (const auto& [batch, rank] : pass.held) undone.insert(batch);
    all.push_back({key.first, key.second, pass.batches, pass.next, {undone.begin(), undone.end()}});
  }
  return all;
}

void Dealer::go_on(const std::vector<PassProgress>& passes) {
  Dealer begun;
  for (const auto& pass : passes) {
    const auto& undone = pass.undone;
    const bool ascends = std::adjacent_find(undone.begin(), undone.end(), std::greater_equal<>()) == undone.end();
    const bool is_within = (undone.empty() || undone.back() < pass.next) &&
                           (pass.batches == 0 || pass.next <= pass.batches) && pass.next <= kMaxStep;
    if (!ascends || !is_within) throw InvalidArgument("no pass over a loader can be as far as one that is to go on");
    begun.passes_[{pass.loader, pass.epoch}] = {pass.batches, pass.next, {undone.begin(), undone.end()}, {}};
    auto& newest = begun.newest_[pass.loader];
    newest = std::max(newest, pass.epoch);
  }
  *this = std::move(begun);
}

Dealer::Record Dealer::record() const {
  Record record;
  record.newest = newest();
  for (const auto& [key, pass] : passes_) {
    Record::Pass saved{key.first, key.second, pass.batches, pass.next, {}, {}, {}};
    saved.returned.assign(pass.returned.begin(), pass.returned.end());
    for (const auto& [batch, rank] : pass.held) {
      saved.held.push_back(batch);
      saved.holders.push_back(rank);
    }
    record.passes.push_back(std::move(saved));
  }
  return record;
}

void Dealer::restore(const Record& record) {
  passes_.clear();
  last_.clear();
  newest_.clear();
  for (const auto& [loader, epoch] : record.newest) newest_[loader] = epoch;
  for (const auto& saved : record.passes) {
    if (saved.held.size() != saved.holders.size()) {
      throw CheckpointError("a snapshot's list of batches is damaged; use an older snapshot");
    }
    auto& pass = passes_[{saved.loader, saved.epoch}];
    pass.batches = saved.batches;
    pass.next = saved.next;
    pass.returned.insert(saved.returned.begin(), saved.returned.end());
    for (size_t i = 0; i < saved.held.size(); ++i) pass.held[saved.held[i]] = saved.holders[i];
  }
}

}  // namespace muster::server
