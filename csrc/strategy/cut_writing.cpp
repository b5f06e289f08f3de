#include "strategy/cut_writing.h"

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

void await_servers(const fs::path& draft, const std::vector<std::string>& writers, std::chrono::milliseconds patience) {
  std::vector<checkpoint::AwaitedPart> awaited;
  for (const auto& writer : writers) awaited.push_back({writer, true});
  try {
    if (const auto failure = checkpoint::await_parts(draft, awaited, patience)) std::rethrow_exception(failure);
  } catch (const CheckpointError& error) {
    throw CheckpointError(std::string("of the parameter servers, ") + error.what() + "; the next save is tried anew");
  }
}

fs::path write_draft(const fs::path& draft, Parts parts, const checkpoint::Metadata& metadata,
                     const checkpoint::SnapshotOptions& options, std::chrono::milliseconds patience) {
  try {
    const auto next = [&] { return std::exchange(parts.own, {}); };
    checkpoint::write_part(draft, server::kChiefsPart, next, options);
    await_servers(draft, parts.writers, patience);
    parts.writers.emplace_back(server::kChiefsPart);
    return checkpoint::finish_draft(draft, parts.writers, metadata, options, parts.names);
  } catch (...) {
    checkpoint::drop_draft(draft);
    throw;
  }
}

}  // namespace

CutWriting::CutWriting(checkpoint::SnapshotWriter& writer, StrategyCore& core) : writer_(writer), core_(core) {
  writer_.claim();
  draft_ = checkpoint::begin_draft(writer_.folder());
  try {
    lock_ = std::make_shared<const checkpoint::PartLock>(draft_, server::kChiefsPart);
    cut_ = core_.sets().servers().begin_cut(draft_);
    if (cut_->refusal().empty()) return;
    cut_ = nullptr;
    checkpoint::drop_draft(draft_);
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
    if (tensor.is_meta()) checkpoint::check_storable(name, tensor);  // refuses it
    own.push_back(checkpoint::Run::whole(name, tensor));
  }
  parts.own = writer_.copied(own);
  for (const auto& run : parts.own) checkpoint::check_storable(run.name, run.elements);
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
  if (std::exchange(cut_, nullptr) == nullptr) return;
  core_.sets().servers().end_cut();
  if (!is_started_) checkpoint::drop_draft(draft_);
  lock_ = nullptr;
}

}  // namespace muster
