// Text that processes exchange and files hold: the same whatever locale a program has chosen.
#pragma once

#include <locale>
#include <sstream>
#include <string>
#include <string_view>

namespace muster {

/// Writes as the classic locale does, also where std::locale::global is another one.
class TextWriter : public std::ostringstream {
 public:
  TextWriter() { imbue(std::locale::classic()); }
};

/// Reads what TextWriter wrote.
class TextReader : public std::istringstream {
 public:
  explicit TextReader(const std::string& text) : std::istringstream(text) { imbue(std::locale::classic()); }
};

/// A number that take_number() reads back bit for bit; of a NaN, that it is one.
std::string exact_text(double number);
/// The number that exact_text() wrote at the beginning of `text`, which is advanced behind it. Throws CommError for
/// anything else.
double take_number(std::string_view& text);

}  // namespace muster
