#include "strategy/cut_writing.h"

#include <chrono>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "checkpoint/draft.h"
#include "checkpoint/part_claim.h"
#include "checkpoint/safetensors.h"
#include "muster/error.h"

namespace muster {

namespace {

namespace fs = std::filesystem;

constexpr const char* kChiefsPart = "chief";
constexpr std::chrono::milliseconds kLook{5};  // between two looks at whether a server's part is there

struct Parts {
  std::vector<checkpoint::Run> own;
  std::vector<std::string> writers;  // others
  std::map<std::string, std::string> names;
};

void await_server(const fs::path& draft, size_t server, const std::string& writer) {
  try {
    while (!checkpoint::has_part_of_living(draft, writer)) std::this_thread::sleep_for(kLook);
  } catch (const CheckpointError& error) {
    throw CheckpointError("parameter server " + std::to_string(server) + ": " + error.what() +
                          "; the next save is tried anew");
  }
}

fs::path write_draft(const fs::path& draft, Parts parts, const checkpoint::Metadata& metadata,
                     const checkpoint::SnapshotOptions& options) {
  try {
    const auto next = [&] { return std::exchange(parts.own, {}); };
    checkpoint::write_part(draft, kChiefsPart, next, options);
    for (size_t s = 0; s < parts.writers.size(); ++s) await_server(draft, s, parts.writers[s]);
    parts.writers.emplace_back(kChiefsPart);
    return checkpoint::finish_draft(draft, parts.writers, metadata, options, parts.names);
  } catch (...) {
    checkpoint::drop_draft(draft);
    throw;
  }
}

}  // namespace

CutWriting::CutWriting(checkpoint::SnapshotWriter& writer, ParameterSets& sets) : writer_(writer), sets_(sets) {
  writer_.claim();
  draft_ = checkpoint::begin_draft(writer_.folder());
  try {
    cut_ = &sets_.servers().begin_cut(draft_);
  } catch (...) {
    checkpoint::drop_draft(draft_);
    throw;
  }
}

at::Tensor CutWriting::stand_in(int parameter) {
  auto tensor = sets_.stand_in(parameter);
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
  writer_.begin([this_draft = draft_, parts = std::move(parts), metadata = snapshot.metadata,
                 options = writer_.options()] { return write_draft(this_draft, parts, metadata, options); });
  is_started_ = true;
}

void CutWriting::close() noexcept {
  if (std::exchange(cut_, nullptr) == nullptr) return;
  sets_.servers().end_cut();
  if (!is_started_) checkpoint::drop_draft(draft_);
}

}  // namespace muster
