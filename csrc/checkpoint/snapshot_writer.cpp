#include "checkpoint/snapshot_writer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <unistd.h>

#include <system_error>
#include <utility>

#include "core/log.h"
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

void SnapshotWriter::write(Snapshot snapshot) {
  for (const auto& [name, tensor] : snapshot.tensors) check_storable(name, tensor);
  wait();
  if (!claim_) claim_ = std::make_unique<FolderClaim>(folder_);
  {
    const std::lock_guard lock(mutex_);
    running_ = true;
  }
  try {
    thread_ = std::thread([this, snapshot = std::move(snapshot)] { run(snapshot); });
  } catch (const std::system_error& error) {
    const std::lock_guard lock(mutex_);
    running_ = false;
    throw CheckpointError("cannot make the thread that writes to the folder '" + folder_.string() +
                          "': " + error.code().message() + "; allow more threads (ulimit -u, or the container's pids)");
  }
}

void SnapshotWriter::write_copy(const Snapshot& snapshot) {
  for (const auto& [name, tensor] : snapshot.tensors) check_storable(name, tensor);
  wait();
  const at::NoGradGuard no_grad;
  NamedTensors copies;
  for (const auto& [name, tensor] : snapshot.tensors) {
    auto& copy = copies_[name];
    if (!copy.defined() || copy.scalar_type() != tensor.scalar_type() || copy.sizes() != tensor.sizes()) {
      copy = at::empty(tensor.sizes(), tensor.scalar_type());
    }
    copy.copy_(tensor);
    copies.emplace(name, copy);
  }
  copies_ = copies;
  write({std::move(copies), snapshot.metadata});
}

bool SnapshotWriter::done() const {
  const std::lock_guard lock(mutex_);
  return !running_;
}

std::filesystem::path SnapshotWriter::written() const {
  const std::lock_guard lock(mutex_);
  return written_;
}

void SnapshotWriter::wait() {
  if (thread_.joinable()) thread_.join();
  std::exception_ptr error;
  {
    const std::lock_guard lock(mutex_);
    error = std::exchange(error_, nullptr);
  }
  if (error) std::rethrow_exception(error);
}

void SnapshotWriter::run(const Snapshot& snapshot) noexcept {
  std::exception_ptr error;
  try {
    claim_->check();
    const auto written = write_snapshot(folder_, snapshot, options_);
    const std::lock_guard lock(mutex_);
    written_ = written;
  } catch (...) {
    error = std::current_exception();
  }
  const std::lock_guard lock(mutex_);
  error_ = std::move(error);
  running_ = false;
}

}  // namespace muster::checkpoint
