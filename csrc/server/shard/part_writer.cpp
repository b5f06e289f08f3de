#include "server/shard/part_writer.h"

#include <sys/stat.h>
#include <unistd.h>

#include <exception>
#include <filesystem>
#include <system_error>
#include <utility>

#include "checkpoint/draft.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::server {

std::string reason_not_to_write(const std::string& draft) {
  const std::filesystem::path path(draft);
  const bool is_path = draft.find('\0') == std::string::npos && path.is_absolute();
  if (!is_path || !path.filename().string().starts_with(checkpoint::kDraftPrefix)) {
    throw InvalidArgument("'" + draft + "' is not the absolute path of a checkpoint's draft");
  }
  struct stat status{};
  const std::string folder = "the folder '" + path.parent_path().string() + "' ";
  if (!checkpoint::sees(path, path) || ::lstat(draft.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    return folder + "of the checkpoint is not seen there";
  }
  if (status.st_uid != ::geteuid()) return folder + "is of another user than the server";
  if (!checkpoint::is_locked(path, kChiefsPart)) return "locks (flock) in " + folder + "are not seen there";
  return "";
}

std::optional<WritesPart> PartWriter::find(uint64_t id) {
  Lock lock(mutex_);
  if (id == id_) return answer_;
  gives_up_ = true;
  if (part_) {
    const auto unwritten = std::exchange(part_, nullptr);
    const auto its_lock = std::exchange(lock_, nullptr);
    lock.unlock();  // images end under locks of their own
  } else {
    changed_.wait(lock, [&] { return !is_writing_; });
  }
  return std::nullopt;
}

void PartWriter::begin(std::unique_ptr<ShardPart> part, std::unique_ptr<checkpoint::PartLock> its_lock) {
  const Lock lock(mutex_);
  if (is_writing_ || part_ || stops_) {
    throw CheckpointError("this parameter server writes another checkpoint's part, or ends; save again");
  }
  id_ = part->id();
  answer_ = part->answer();
  part_ = std::move(part);
  lock_ = std::move(its_lock);
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
  std::unique_ptr<checkpoint::PartLock> its_lock;
  {
    const Lock lock(mutex_);
    part = std::exchange(part_, nullptr);
    its_lock = std::exchange(lock_, nullptr);
    if (!part) return;
    is_writing_ = true;
  }
  try {
    part->write([this] { check(); });
  } catch (const std::exception& error) {
    std::error_code ignored;
    const bool is_wanted = std::filesystem::exists(part->draft(), ignored);
    log(is_wanted ? LogLevel::warning : LogLevel::info,
        "the part of a checkpoint could not be written: " + std::string(error.what()));
    checkpoint::fail_part(part->draft(), part->writer(), error.what());
  }
  part = nullptr;
  its_lock = nullptr;
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
