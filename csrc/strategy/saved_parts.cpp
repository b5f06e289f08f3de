#include "strategy/saved_parts.h"

#include "muster/error.h"

namespace muster::detail {

const SavedValue& member(const SavedValue::Dict& dict, const std::string& key) {
  const auto found = dict.find(key);
  if (found != dict.end()) return found->second;
  throw CheckpointError("a checkpoint lacks '" + key + "'; load another one");
}

int64_t integer(const SavedValue::Dict& dict, const std::string& key) { return member(dict, key).get<int64_t>(); }

const SavedValue* part_of(const SavedValue::Dict& saved, const std::string& key) {
  const auto found = saved.find(key);
  return found == saved.end() || found->second.is_null() ? nullptr : &found->second;
}

const SavedValue::List& list_of(const SavedValue::Dict& saved, const std::string& key) {
  static const SavedValue::List none;
  const auto* const part = part_of(saved, key);
  return part == nullptr ? none : part->get<SavedValue::List>();
}

}  // namespace muster::detail
