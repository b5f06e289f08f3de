// Texts of lines, which ranks compare.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace muster {

/// The lines of a text, without their ends.
std::vector<std::string> lines_of(const std::string& text);

/// A line in which two texts differ; the word "nothing" of the one that ends before it.
struct LineDifference {
  size_t number = 0;  ///< from 0 on
  std::string first;
  std::string second;
};

/// The first line in which they differ; empty where they have the same lines.
std::optional<LineDifference> first_difference(const std::string& first, const std::string& second);

}  // namespace muster
