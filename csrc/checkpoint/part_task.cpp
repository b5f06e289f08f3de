#include "checkpoint/part_task.h"

#include <map>
#include <numeric>
#include <utility>

#include "checkpoint/parts_elsewhere.h"
#include "core/log.h"
#include "muster/error.h"

namespace muster::checkpoint {

namespace {

NextRuns one_by_one(const std::vector<Run>& runs) {
  return [&runs, next = size_t{0}]() mutable {
    return next == runs.size() ? std::vector<Run>() : std::vector<Run>{runs[next++]};
  };
}

std::string reason_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

std::vector<std::string> PartTask::writers() const {
  std::vector<std::string> names{writer};
  for (const auto& other : others) names.push_back(other.writer);
  return names;
}

void PartTask::write() const {
  try {
    write_part(draft, writer, one_by_one(runs), options, labels);
  } catch (const std::exception& error) {
    fail_part(draft, writer, error.what());
    throw;
  }
}

std::filesystem::path PartTask::write_and_finish(const Metadata& metadata, std::chrono::milliseconds patience) const {
  auto names = writers();
  names.insert(names.end(), elsewhere.begin(), elsewhere.end());
  std::map<std::string, std::string> hosts;
  std::vector<WordOfHost> words;
  auto awaited = others;
  for (const auto& leader : leaders) {
    words.emplace_back(store, leader);
    awaited.push_back(words.back().awaited(draft, hosts));
  }
  const auto await_others = [&] {
    auto failure = await_parts(draft, awaited, patience);
    for (const auto& name : elsewhere) {
      if (failure || hosts.contains(name)) continue;
      failure = std::make_exception_ptr(
          CheckpointError("no host has told of the part of " + name +
                          ": ranks of its host do not see one another's files; mount the folder there with the "
                          "options lookupcache=none and actimeo=0, or give one that all hosts share"));
    }
    return failure;
  };
  try {
    auto snapshot = checkpoint::write_and_finish(draft, writer, one_by_one(runs), await_others, names, metadata,
                                                 options, {}, hosts);
    for (const auto& word : words) word.forget();
    return snapshot;
  } catch (...) {
    for (const auto& word : words) word.give_up();
    throw;
  }
}

void PartTask::write_and_place(std::chrono::milliseconds patience) const {
  std::map<std::string, std::string> manifests;
  try {
    manifests = write_placed(patience);
  } catch (const std::exception& error) {
    drop_draft(draft);
    tell_failure(error.what());
    throw;
  }
  if (manifests.empty()) return;
  WordOfHost(store, writer, patience).tell_parts(std::move(manifests));
  remove_placed_parts(draft.parent_path(), oldest, lineage, options.secret);
}

// The manifests of the host's parts, by writer; none where another writer of the host has failed, which says so itself.
std::map<std::string, std::string> PartTask::write_placed(std::chrono::milliseconds patience) const {
  std::exception_ptr failure;
  std::exception_ptr theirs;
  {
    const auto written = [&] {
      const auto names = writers();
      const auto add = [&](uint64_t sum, const std::string& name) { return sum + written_by(draft, name); };
      return std::accumulate(names.begin(), names.end(), uint64_t{0}, add);
    };
    const ProgressTeller teller(WordOfHost(store, writer), written);
    try {
      write_part(draft, writer, one_by_one(runs), options, labels);
    } catch (...) {
      failure = std::current_exception();
    }
    theirs = await_parts(draft, others, patience);  // also then: see checkpoint::write_and_finish
  }
  if (failure) throw CheckpointError(writer + " could not write its part: " + reason_of(failure));
  if (theirs) {
    drop_draft(draft);
    tell_failure(reason_of(theirs));
    return {};
  }
  std::map<std::string, std::string> manifests;
  for (const auto& name : writers()) manifests.emplace(name, part_text(draft, name));
  place_parts(draft, writers());
  return manifests;
}

void PartTask::tell_failure(const std::string& reason) const noexcept {
  try {
    WordOfHost(store, writer).tell_failure(reason);
  } catch (const std::exception& error) {
    log(LogLevel::warning, std::string("the chief waits in vain for a checkpoint's part: ") + error.what());
  }
}

}  // namespace muster::checkpoint
