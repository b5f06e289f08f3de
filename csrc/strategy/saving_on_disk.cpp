// How Strategy::save writes, with parameter servers where they hold something.
#include <muster/version.h>

#include <chrono>
#include <thread>
#include <utility>

#include "checkpoint/saved_tree.h"
#include "strategy/saved_parts.h"
#include "strategy/saving.h"
#include "strategy/strategy_state.h"

namespace muster {

namespace {

// Puts stand-ins in the place of what servers write of the modules' tensors.
void put_stand_ins(SavedValue::Dict& content, const std::vector<detail::PreparedModule>& modules,
                   const ParameterRegistry& registry, CutWriting& cut) {
  auto saved = content.at("modules").get<SavedValue::List>();
  for (size_t number = 0; number < modules.size(); ++number) {
    auto tensors = saved[number].get<SavedValue::Dict>();
    for (const auto& parameter : modules[number].replicas().front()->named_parameters()) {
      const auto found = tensors.find(parameter.key());
      const int index = found == tensors.end() ? -1 : registry.find(parameter.value());
      if (index < 0) continue;
      if (auto stand_in = cut.stand_in(index); stand_in.defined()) found->second = std::move(stand_in);
    }
    saved[number] = std::move(tensors);
  }
  content["modules"] = std::move(saved);
}

}  // namespace

void Saving::wait() const {
  constexpr std::chrono::milliseconds kPoll{2};
  while (writer_ && !writer_->done()) std::this_thread::sleep_for(kPoll);
}

checkpoint::SnapshotWriter& Saving::writer_of(const std::filesystem::path& folder, const SaveOptions& options) {
  const auto made_with = std::pair(std::filesystem::absolute(folder), options.keep);
  if (!writer_ || made_with_ != made_with) {
    finish();
    writer_ = nullptr;  // which lets the folder go
    writer_ = std::make_unique<checkpoint::SnapshotWriter>(made_with.first,
                                                           checkpoint::SnapshotOptions{.keep = options.keep});
    made_with_ = made_with;
  }
  return *writer_;
}

std::unique_ptr<CutWriting> Saving::begin_cut(const std::filesystem::path& folder, const SaveOptions& options) {
  auto& sets = strategy_.core->sets();
  return sets.has_servers() ? std::make_unique<CutWriting>(writer_of(folder, options), sets) : nullptr;
}

void Saving::write(const std::filesystem::path& folder, Dict content, const SaveOptions& options, CutWriting* cut) {
  finish();
  if (cut != nullptr) put_stand_ins(content, strategy_.modules, strategy_.core->session().registry(), *cut);
  auto tree = cut != nullptr ? checkpoint::encode_tree_in_place(content) : checkpoint::encode_tree(content);
  const checkpoint::Snapshot snapshot{std::move(tree.tensors),
                                      {{"muster.format", detail::kFormat},
                                       {"muster.version", std::string(version())},
                                       {"torch.version", std::string(built_with_torch())},
                                       {"steps", strategy_.core->stepper().steps()},
                                       {"content", std::move(tree.document)}}};
  if (cut != nullptr) return cut->start(snapshot);
  writer_of(folder, options).write_copy(snapshot);
}

}  // namespace muster
