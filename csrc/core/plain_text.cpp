#include "core/plain_text.h"

#include <charconv>
#include <system_error>

#include "muster/error.h"

namespace muster {

std::string exact_text(double number) {
  char text[32];
  return {text, std::to_chars(text, text + sizeof(text), number).ptr};
}

double take_number(std::string_view& text) {
  double number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) {
    throw CommError("'" + std::string(text) +
                    "' came from another process where a number was awaited; run one version of Muster on all workers");
  }
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace muster
