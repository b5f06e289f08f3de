#include "server/shard/part_writer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <utility>

#include "checkpoint/draft.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::server {

void check_draft(const std::string& draft) {
  const std::filesystem::path path(draft);
  const auto fail = [&](const std::string& why) {
    throw InvalidArgument("'" + draft + "' " + why +
                          ", so that this parameter server does not write a checkpoint's part there; run servers and "
                          "workers as one user, on one host, and see the same folders");
  };
  if (draft.find('\0') != std::string::npos || !path.is_absolute()) fail("is no absolute path");
  if (!path.filename().string().starts_with(checkpoint::kDraftPrefix)) fail("is no draft of a checkpoint");
  struct stat status{};
  if (::lstat(draft.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) fail("is no folder here");
  if (status.st_uid != ::geteuid()) fail("is another user's folder");
}

std::optional<WritesPart> PartWriter::find(uint64_t id) {
  Lock lock(mutex_);
  if (id == id_) return answer_;
  gives_up_ = true;
  if (part_) {
    const auto unwritten = std::exchange(part_, nullptr);
    const auto claim = std::exchange(claim_, nullptr);
    lock.unlock();  // images end under locks of their own
  } else {
    changed_.wait(lock, [&] { return !is_writing_; });
  }
  return std::nullopt;
}

void PartWriter::begin(std::unique_ptr<ShardPart> part) {
  auto claim = std::make_unique<checkpoint::PartClaim>(part->draft(), part->writer());
  const Lock lock(mutex_);
  if (is_writing_ || part_ || stops_) {
    throw CheckpointError("this parameter server writes another checkpoint's part, or ends; save again");
  }
  id_ = part->id();
  answer_ = part->answer();
  part_ = std::move(part);
  claim_ = std::move(claim);
  gives_up_ = false;
  changed_.notify_all();
}

bool PartWriter::wait() {
  Lock lock(mutex_);
  changed_.wait(lock, [&] { return stops_ || part_ != nullptr; });
  return !stops_;
}

void PartWriter::check() const {
  const Lock lock(mutex_);
  if (gives_up_ || stops_) throw CheckpointError("it was given up");
}

void PartWriter::write() noexcept {
  std::unique_ptr<ShardPart> part;
  std::unique_ptr<checkpoint::PartClaim> claim;
  {
    const Lock lock(mutex_);
    part = std::exchange(part_, nullptr);
    claim = std::exchange(claim_, nullptr);
    if (!part) return;
    is_writing_ = true;
  }
  try {
    part->write([this] { check(); });
  } catch (const std::exception& error) {
    log(LogLevel::warning, "the part of a checkpoint could not be written: " + std::string(error.what()));
    checkpoint::fail_part(part->draft(), part->writer(), error.what());
  }
  part = nullptr;
  claim = nullptr;
  const Lock lock(mutex_);
  is_writing_ = false;
  changed_.notify_all();
}

void PartWriter::stop() {
  std::unique_ptr<ShardPart> unwritten;
  const Lock lock(mutex_);
  unwritten = std::move(part_);
  stops_ = true;
  changed_.notify_all();
}

}  // namespace muster::server
