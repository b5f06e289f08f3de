#include "checkpoint/snapshot_writer.h"

#include <ATen/ops/empty.h>
#include <c10/core/InferenceMode.h>
#include <unistd.h>

#include <utility>

#include "core/log.h"
#include "core/make_thread.h"
#include "core/pages.h"
#include "device/host_copy.h"
#include "muster/error.h"

namespace muster::checkpoint {

SnapshotWriter::SnapshotWriter(std::filesystem::path folder, SnapshotOptions options)
    : folder_(std::move(folder)), options_(std::move(options)), made_by_(::getpid()) {}

SnapshotWriter::~SnapshotWriter() {
  if (::getpid() != made_by_) {
    if (thread_.joinable()) thread_.detach();  // a thread of the process that was forked
    return;
  }
  try {
    wait();
  } catch (const std::exception& error) {
    log(LogLevel::error, std::string("the last snapshot was not written: ") + error.what());
  }
}

void SnapshotWriter::claim() {
  wait_and_claim();
  claim_->check();
}

void SnapshotWriter::wait_and_claim() {
  if (::getpid() != made_by_) {
    throw CheckpointError("a forked child writes no checkpoints for its parent, which has claimed '" +
                          folder_.string() + "'; save in the parent");
  }
  wait();
  if (!claim_) claim_ = std::make_unique<FolderClaim>(folder_);
}

void SnapshotWriter::write(Snapshot snapshot) {
  for (const auto& [name, tensor] : snapshot.tensors) check_storable(name, tensor);
  begin(std::move(snapshot));
}

void SnapshotWriter::begin(Snapshot snapshot) {
  wait_and_claim();
  auto options = options_;
  options.least = std::exchange(least_, 1);
  begin([this, options = std::move(options), snapshot = std::move(snapshot)] {
    claim_->check();
    return write_snapshot(folder_, snapshot, options);
  });
}

void SnapshotWriter::write_copy(const Snapshot& snapshot) {
  std::vector<Run> runs;
  for (const auto& [name, tensor] : snapshot.tensors) {
    check_storable(name, tensor);
    runs.push_back(Run::whole(name, tensor));
  }
  wait();
  Snapshot copy{{}, snapshot.metadata};
  for (auto& run : copied(runs)) copy.tensors.emplace(run.name, std::move(run.elements));
  begin(std::move(copy));
}

std::vector<Run> SnapshotWriter::copied(const std::vector<Run>& runs) {
  const c10::InferenceMode normal(false);  // the next save writes them again, outside of a caller's inference mode
  NamedTensors copies;
  std::vector<Run> result;
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  for (const auto& run : runs) {
    auto& copy = copies_[run.name];
    if (!copy.defined() || copy.scalar_type() != run.elements.scalar_type() || copy.sizes() != run.elements.sizes()) {
      copy = at::empty(run.elements.sizes(), run.elements.scalar_type());
      prefer_huge_pages(copy.mutable_data_ptr(), copy.nbytes());
    }
    pairs.emplace_back(copy, run.elements);
    copies.emplace(run.name, copy);
    result.push_back({run.name, run.shape, run.begin, copy});
  }
  copy_all(pairs);
  copies_ = std::move(copies);
  return result;
}

void SnapshotWriter::begin(std::function<std::filesystem::path()> write) {
  {
    const std::lock_guard lock(mutex_);
    running_ = true;
  }
  try {
    thread_ = make_thread<CheckpointError>("writes to the folder '" + folder_.string() + "'",
                                           [this, write = std::move(write)] { run(write); });
  } catch (...) {
    const std::lock_guard lock(mutex_);
    running_ = false;
    throw;
  }
}

void SnapshotWriter::note_failure(std::exception_ptr error) noexcept {
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
}

bool SnapshotWriter::done() const {
  if (::getpid() != made_by_) return true;
  const std::lock_guard lock(mutex_);
  return !running_;
}

std::filesystem::path SnapshotWriter::written() const {
  const std::lock_guard lock(mutex_);
  return written_;
}

void SnapshotWriter::wait() {
  if (::getpid() != made_by_) return;
  if (thread_.joinable()) thread_.join();
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void SnapshotWriter::run(const std::function<std::filesystem::path()>& write) noexcept {
  std::exception_ptr error;
  try {
    auto written = write();
    const std::lock_guard lock(mutex_);
    if (!written.empty()) written_ = std::move(written);
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  running_ = false;
}

}  // namespace muster::checkpoint
