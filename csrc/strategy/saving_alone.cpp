// How Strategy::save writes where one worker does it, with parameter servers where they hold something.
#include <chrono>
#include <thread>
#include <utility>

#include "checkpoint/saved_tree.h"
#include "strategy/cut_writing.h"
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

void Saving::save_alone(const std::filesystem::path& folder, const SavedState& state, const SaveOptions& options) {
  auto& writer = writer_to(folder, options);
  // First: a batch of a step that is made meanwhile comes once more, and is not lost.
  const auto places = strategy_.loaders.saved();
  if (strategy_.core->sets().has_servers() && save_with_servers(writer, state, places)) return;
  auto tree = checkpoint::encode_tree(content(state, places, generators(), nullptr));
  writer.write_copy({std::move(tree.tensors), metadata(std::move(tree.document))});
}

bool Saving::save_with_servers(checkpoint::SnapshotWriter& writer, const SavedState& state,
                               const SavedValue::List& places) {
  CutWriting cut(writer, *strategy_.core);
  if (!cut.is_begun()) return false;
  auto whole = content(state, places, generators(), nullptr);
  put_stand_ins(whole, strategy_.modules, strategy_.core->session().registry(), cut);
  auto tree = checkpoint::encode_tree_in_place(whole);
  cut.start({std::move(tree.tensors), metadata(std::move(tree.document))});
  return true;
}

}  // namespace muster
