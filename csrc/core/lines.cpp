#include "core/lines.h"

#include <utility>

#include "core/plain_text.h"

namespace muster {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  TextReader in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(std::move(line));
  return lines;
}

std::optional<LineDifference> first_difference(const std::string& first, const std::string& second) {
  const auto lines = lines_of(first);
  const auto others = lines_of(second);
  const auto line_of = [](const std::vector<std::string>& text, size_t number) {
    return number < text.size() ? text[number] : std::string("nothing");
  };
  for (size_t number = 0; number < lines.size() || number < others.size(); ++number) {
    LineDifference found{number, line_of(lines, number), line_of(others, number)};
    if (found.first != found.second) return found;
  }
  return std::nullopt;
}

}  // namespace muster
