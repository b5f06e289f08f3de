#include "core/plain_text.h"

#include <cmath>
#include <limits>
#include <locale>

#include "cpp/catch.h"
#include "muster/error.h"

using namespace muster;

namespace {

// 1.234,5
struct Separated : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\3"; }
};

class GlobalLocale {
 public:
  explicit GlobalLocale(const std::locale& locale) : before_(std::locale::global(locale)) {}
  ~GlobalLocale() { std::locale::global(before_); }
  GlobalLocale(const GlobalLocale&) = delete;
  GlobalLocale& operator=(const GlobalLocale&) = delete;

 private:
  const std::locale before_;
};

}  // namespace

TEST_CASE("text is the same in any locale", "[core]") {
  const GlobalLocale locale(std::locale(std::locale::classic(), new Separated));
  TextWriter out;
  out << 1234567 << ' ' << 1.5;
  CHECK(out.str() == "1234567 1.5");
  int64_t whole = 0;
  double number = 0;
  TextReader("1234567 1.5") >> whole >> number;
  CHECK(whole == 1234567);
  CHECK(number == 1.5);
}

TEST_CASE("numbers come back bit for bit", "[core]") {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double number : {0.0, -0.0, 3.0, 0.1, -1e-300, std::numeric_limits<double>::denorm_min(), kInfinity}) {
    const std::string text = exact_text(number) + " rest";
    std::string_view rest(text);
    const double read = take_number(rest);
    CHECK(read == number);
    CHECK(std::signbit(read) == std::signbit(number));
    CHECK(rest == " rest");
  }
  const std::string none = exact_text(std::nan(""));
  std::string_view nan(none);
  CHECK(std::isnan(take_number(nan)));
  std::string_view word("word");
  CHECK_THROWS_AS(take_number(word), CommError);
}
