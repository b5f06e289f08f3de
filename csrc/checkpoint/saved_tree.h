// Nested values in a file: a JSON document, and tensors by names that say where in the document they are. Python's
// saved_tree.py writes and reads the same.
#pragma once

#include <string>

#include "checkpoint/safetensors.h"
#include "muster/saved_value.h"

namespace muster::checkpoint {

/// What a file holds of a value.
struct SavedTree {
  std::string document;
  NamedTensors tensors;  ///< on the CPU, and not copied where they are there already
};

/// What JSON has no word for is an object of one member: {"tensor": name}, {"tuple": [...]}, {"dict": {...}},
/// {"items": [[key, value], ...]}, {"counter": [[key, value], ...]} and {"float": "nan"} (or "inf", "-inf"). Throws
/// InvalidArgument, naming the place, for a tensor that cannot be stored, and for text that is not UTF-8.
SavedTree encode_tree(const SavedValue& value);

/// The same with tensors on the device where they are, whether or not a file can hold them.
SavedTree encode_tree_in_place(const SavedValue& value);

/// The value. Throws CheckpointError, naming `source`, for what encode_tree does not give.
SavedValue decode_tree(const SavedTree& tree, const std::string& source);

/// The value of a document alone, with nothing in place of tensors. Throws as decode_tree.
SavedValue decode_outline(const std::string& document, const std::string& source);

}  // namespace muster::checkpoint
