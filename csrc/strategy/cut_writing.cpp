#include "strategy/cut_writing.h"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/draft.h"
#include "checkpoint/safetensors.h"
#include "muster/error.h"

namespace muster {

namespace {

namespace fs = std::filesystem;

struct Parts {
  std::vector<checkpoint::Run> own;
  std::vector<std::string> writers;  // others
  std::map<std::string, std::string> names;
};

std::exception_ptr await_servers(const fs::path& draft, const std::vector<std::string>& writers,
                                 std::chrono::milliseconds patience) {
  std::vector<checkpoint::AwaitedPart> awaited;
  for (const auto& writer : writers) awaited.push_back({writer, true});
  auto failure = checkpoint::await_parts(draft, awaited, patience);
  if (!failure) return nullptr;
  try {
    std::rethrow_exception(failure);
  } catch (const CheckpointError& error) {
    return std::make_exception_ptr(
        CheckpointError(std::string("of the parameter servers, ") + error.what() + "; the next save is tried anew"));
  } catch (...) {
    return failure;
  }
}

fs::path write_draft(const fs::path& draft, Parts parts, const checkpoint::Metadata& metadata,
                     const checkpoint::SnapshotOptions& options, std::chrono::milliseconds patience) {
  const auto next = [&] { return std::exchange(parts.own, {}); };
  const auto await_others = [&, servers = parts.writers] { return await_servers(draft, servers, patience); };
  parts.writers.emplace_back(server::kChiefsPart);
  return checkpoint::write_and_finish(draft, server::kChiefsPart, next, await_others, parts.writers, metadata, options,
                                      parts.names);
}

}  // namespace

CutWriting::CutWriting(checkpoint::SnapshotWriter& writer, StrategyCore& core)
    : writer_(writer), core_(core), made_by_(::getpid()), pass_(core.session().enter()) {
  writer_.claim();
  draft_ = checkpoint::begin_draft(writer_.folder());
  try {
    lock_ = std::make_shared<const checkpoint::PartLock>(draft_, server::kChiefsPart);
    cut_ = core_.sets().servers().begin_cut(draft_);
    if (cut_) return;
    checkpoint::drop_draft(draft_);
    pass_.reset();
  } catch (...) {
    checkpoint::drop_draft(draft_);
    throw;
  }
}

at::Tensor CutWriting::stand_in(int parameter) {
  auto tensor = core_.sets().stand_in(parameter);
  return tensor.defined() && given_.insert(parameter).second ? tensor : at::Tensor();
}

void CutWriting::start(const checkpoint::Snapshot& snapshot) {
  Parts parts;
  std::vector<checkpoint::Run> own;
  for (const auto& [name, tensor] : snapshot.tensors) {
    if (auto of_servers = cut_->name_of(tensor)) {
      if (!parts.names.emplace(std::move(*of_servers), name).second) {
        throw InvalidArgument("'" + name + "' is a tensor that the checkpoint has under another name");
      }
      continue;
    }
    checkpoint::check_copy_storable(name, tensor);
    own.push_back(checkpoint::Run::whole(name, tensor));
  }
  parts.own = writer_.copied(own);
  parts.writers = cut_->writers();
  const std::chrono::duration<double> timeout(core_.session().options().timeout);
  writer_.begin([this_draft = draft_, its_lock = lock_, parts = std::move(parts), metadata = snapshot.metadata,
                 options = writer_.options(),
                 patience = std::chrono::duration_cast<std::chrono::milliseconds>(timeout)] {
    return write_draft(this_draft, parts, metadata, options, patience);
  });
  is_started_ = true;
}

void CutWriting::close() noexcept {
  if (::getpid() != made_by_ || std::exchange(cut_, nullptr) == nullptr) return;
  core_.sets().servers().end_cut();
  if (!is_started_) checkpoint::drop_draft(draft_);
  lock_ = nullptr;
  pass_.reset();
}

}  // namespace muster
