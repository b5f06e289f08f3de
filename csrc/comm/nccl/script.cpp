#include "comm/nccl/script.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "core/flat_layout.h"

namespace muster::comm::nccl {
namespace {

constexpr size_t kMostScripts = 4;

// Source of a gather whose sizes differ, which no other operation has.
constexpr int32_t kAnySizes = -1;

uint64_t digest_of(const Script& script) {
  uint64_t digest = stable_hash(script.has_queue ? "with a queue" : "");
  for (const Line& line : script.lines) {
    digest = stable_hash({reinterpret_cast<const char*>(&line.request), sizeof(Request)}, digest);
    digest = stable_hash(line.meets ? "meets" : "", digest);
  }
  return digest | 1;
}

}  // namespace

bool Line::asks_for(const Line& other) const noexcept {
  return std::memcmp(&request, &other.request, sizeof(Request)) == 0;
}

Line line_of(const Request& request, GatherSizes sizes) {
  Line line{request};
  line.request.scope = 0;
  const bool has_any_sizes = request.kind == OpKind::all_gather && sizes == GatherSizes::any;
  // A barrier holds back what is not on the device, too.
  line.meets = has_any_sizes || request.kind == OpKind::barrier;
  if (!has_any_sizes) return line;
  line.request.source = kAnySizes;
  line.request.numel = 0;
  std::fill(std::begin(line.request.sizes), std::end(line.request.sizes), 0);
  return line;
}

bool Script::begins_as(bool queued, const Line& first) const noexcept {
  return has_queue == queued && lines.front().asks_for(first);
}

std::deque<Scripts::Known>::iterator Scripts::place_of(bool has_queue, const Line& first) noexcept {
  return std::find_if(known_.begin(), known_.end(),
                      [&](const Known& known) { return known.script->begins_as(has_queue, first); });
}

std::shared_ptr<const Script> Scripts::find(bool has_queue, const Line& first) noexcept {
  const auto found = place_of(has_queue, first);
  return found != known_.end() && found->was_repeated ? found->script : nullptr;
}

// Where it meets may vary: queued operations are ready now here, now there.
void Scripts::learn(Script script) {
  const auto found = place_of(script.has_queue, script.lines.front());
  bool was_repeated = false;
  if (found != known_.end()) {
    const auto& earlier = found->script->lines;
    was_repeated = std::equal(earlier.begin(), earlier.end(), script.lines.begin(), script.lines.end(),
                              [](const Line& a, const Line& b) { return a.asks_for(b); });
    known_.erase(found);
  }
  script.digest = digest_of(script);
  known_.push_front({std::make_shared<const Script>(std::move(script)), was_repeated});
  if (known_.size() > kMostScripts) known_.pop_back();
}

void Scripts::keep(const Script& script) noexcept {
  const auto found = place_of(script.has_queue, script.lines.front());
  if (found != known_.end()) std::rotate(known_.begin(), found, found + 1);
}

void Scripts::forget(const Script& script) noexcept {
  const auto found = place_of(script.has_queue, script.lines.front());
  if (found != known_.end()) known_.erase(found);
}

}  // namespace muster::comm::nccl
