#include "server/worker/batch_book.h"

#include <algorithm>

namespace muster::server {

void BatchBook::note_finished(const std::vector<BatchId>& batches, uint64_t step) {
  for (const auto& batch : batches) {
    held_.erase(batch);
    finished_[batch] = step;
  }
}

void BatchBook::note_end(uint32_t loader, uint64_t epoch) {
  std::erase_if(held_, [&](const BatchId& batch) { return batch.loader == loader && batch.epoch == epoch; });
}

void BatchBook::release(uint64_t step) {
  std::erase_if(finished_, [&](const auto& entry) { return entry.second <= step; });
}

std::vector<BatchId> BatchBook::held() const {
  std::vector<BatchId> batches(held_.begin(), held_.end());
  batches.resize(std::min(batches.size(), kMaxBatches));
  return batches;
}

std::vector<BatchId> BatchBook::finished() const {
  std::vector<BatchId> batches;
  for (const auto& [batch, step] : finished_) {
    if (batches.size() < kMaxBatches) batches.push_back(batch);
  }
  return batches;
}

}  // namespace muster::server
