// Members of what a checkpoint holds, once it is read.
#pragma once

#include <cstdint>
#include <string>

#include "muster/saved_value.h"

namespace muster::detail {

/// Of what save() writes; load() refuses others.
inline constexpr int64_t kFormat = 1;

/// Throws CheckpointError where it is not there.
const SavedValue& member(const SavedValue::Dict& dict, const std::string& key);

/// The same of an integer; throws InvalidArgument where it is something else.
int64_t integer(const SavedValue::Dict& dict, const std::string& key);

/// Null where the checkpoint lacks the part, as one that was made of another format's file: then load leaves what it is
/// about as it is.
const SavedValue* part_of(const SavedValue::Dict& saved, const std::string& key);

/// A part that is a list; empty where the checkpoint lacks it.
const SavedValue::List& list_of(const SavedValue::Dict& saved, const std::string& key);

}  // namespace muster::detail
