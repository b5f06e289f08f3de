#include "server/worker/batch_book.h"

#include "cpp/catch.h"

using namespace muster::server;

TEST_CASE("a worker knows its batches until server 0 has their steps in snapshots", "[server]") {
  BatchBook book;
  for (uint64_t batch = 0; batch < 4; ++batch) book.note_dealt({1, 2, batch});
  book.note_dealt({1, 3, 0});
  book.note_finished({{1, 2, 1}, {1, 2, 2}}, 5);
  book.note_finished({{1, 2, 3}}, 6);
  CHECK((book.held() == std::vector<BatchId>{{1, 2, 0}, {1, 3, 0}}));
  CHECK((book.finished() == std::vector<BatchId>{{1, 2, 1}, {1, 2, 2}, {1, 2, 3}}));
  book.release(5);
  CHECK((book.finished() == std::vector<BatchId>{{1, 2, 3}}));
  book.note_end(1, 2);
  CHECK((book.held() == std::vector<BatchId>{{1, 3, 0}}));
}
