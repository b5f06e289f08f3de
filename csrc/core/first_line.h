// What to tell of an error of torch's, whose text goes on with a stack.
#pragma once

#include <exception>
#include <string>

namespace muster {

/// The first line of an error's text.
inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace muster
