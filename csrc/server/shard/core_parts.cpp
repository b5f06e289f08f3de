// A server's part of a checkpoint that the chief saves.
#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <iterator>
#include <system_error>
#include <utility>

#include "server/shard/server_core.h"
#include "server/shard/shard_part.h"

namespace muster::server {

namespace {

constexpr std::chrono::seconds kStepIsMade{10};  // for a step that is being made

// What may be otherwise at the next save.
bool passes(const std::error_code& error) {
  constexpr int kPass[] = {EMFILE, ENFILE, ENOMEM, ENOSPC, EDQUOT, EIO, ESTALE, ENOENT};
  return std::ranges::find(kPass, error.value()) != std::end(kPass);
}

}  // namespace

void ServerCore::write_part(Session& session, const WritePart& request) {
  check_step(request.step);
  const auto refuse = [&](std::string why) { reply(session, WritesPart{.refusal = std::move(why)}); };
  if (auto why = reason_not_to_write(request.draft); !why.empty()) return refuse(std::move(why));
  if (session.rank != kChief) throw InvalidArgument("the chief saves, and no other worker; save from rank 0");
  {
    const Lock lock(mutex_);
    quorum_.members().check_member(session.rank, session.incarnation);
  }
  const std::lock_guard asking(parts_.asking());
  if (const auto answer = parts_.find(request.id)) return reply(session, *answer);
  auto lock = std::make_unique<checkpoint::PartLock>(request.draft, writer_of_server(index_of_server(), request.id));
  if (!lock->is_held()) {
    const auto folder = std::filesystem::path(request.draft).parent_path().string();
    const auto why = "no file can be made and locked there in '" + folder + "': " + lock->error().message();
    if (passes(lock->error())) throw CheckpointError(why + "; save again");
    return refuse(why);
  }
  const auto shard = this->shard();
  std::vector<std::unique_ptr<Image>> images;
  if (shard->plan().is_synchronous()) {
    const auto cut = cuts_.gather(shard->members(), request.step, time_.now() + kStepIsMade, &HeldSums::begin_cut);
    if (!cut) {
      throw CheckpointError("this parameter server does not stand after step " + std::to_string(request.step) +
                            ", of which a checkpoint was to be written; save again");
    }
    images = std::move(cut->images);
  } else {
    images = shard->begin_images(&HeldSums::begin_cut);
  }
  auto part = std::make_unique<ShardPart>(shard, index_of_server(), request, std::move(images));
  const auto answer = part->answer();
  parts_.begin(std::move(part), std::move(lock));
  reply(session, answer);
}

uint32_t ServerCore::index_of_server() const {
  const Lock lock(mutex_);
  return index_;
}

}  // namespace muster::server
