#include "data/read_ahead.h"

#include <memory>
#include <stdexcept>

#include "cpp/catch.h"

using muster::detail::ReadAhead;

namespace {

// Number 6 is at the data's end, and number 3 is broken.
std::shared_ptr<void> read_number(size_t, int64_t number) {
  if (number == 3) throw std::out_of_range("broken");
  return number < 6 ? std::make_shared<int64_t>(number) : nullptr;
}

}  // namespace

TEST_CASE("batches come in the order in which their numbers were given, read by threads or not", "[data]") {
  const size_t threads = GENERATE(0, 1, 3);
  ReadAhead reads(threads, read_number);
  int64_t given = 0;
  int64_t taken = 0;
  for (;;) {
    while (reads.has_room()) reads.give(given++);
    CHECK(given <= taken + static_cast<int64_t>(2 * threads) + 1);
    const auto batch = reads.take();
    if (!batch.parts && !batch.error) break;
    CHECK(batch.number == taken);
    CHECK((batch.error != nullptr) == (taken == 3));
    if (batch.parts) CHECK(*std::static_pointer_cast<int64_t>(batch.parts) == taken);
    ++taken;
  }
  CHECK(taken == 6);
  CHECK_FALSE(reads.has_room());
}

TEST_CASE("reads that nobody takes are waited for", "[data]") {
  ReadAhead reads(2, read_number);
  while (reads.has_room()) reads.give(0);
}
