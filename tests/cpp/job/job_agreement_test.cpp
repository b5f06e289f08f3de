#include "job/job_agreement.h"

#include "cpp/catch.h"

namespace muster {

TEST_CASE("workers that are bound have as many threads as workers that share all cores", "[job]") {
  const std::vector<std::string> one_host{"a", "a"};
  CHECK(threads_of_replica(one_host, {"0 1 2 3 4 5 6 7 ", "0 1 2 3 4 5 6 7 "}, {1, 1}) == 4);
  CHECK(threads_of_replica(one_host, {"0 1 2 3 ", "4 5 6 7 "}, {1, 1}) == 4);
  CHECK(threads_of_replica(one_host, {"0 ", "1 "}, {1, 1}) == 1);
  CHECK(threads_of_replica(one_host, {"0 1 2 3 ", "4 5 6 7 "}, {2, 2}) == 2);
}

TEST_CASE("only the chief's host counts, and a replica has a thread at least", "[job]") {
  CHECK(threads_of_replica({"a", "b", "a"}, {"0 1 ", "0 1 2 3 4 5 ", "2 3 "}, {1, 8, 1}) == 2);
  CHECK(threads_of_replica({"a"}, {"0 "}, {4}) == 1);
  CHECK(threads_of_replica({"a"}, {""}, {1}) == 1);
}

TEST_CASE("where containers limit the CPU time, there are no more threads than that", "[job]") {
  const std::vector<std::string> one_host{"a", "a"};
  CHECK(threads_of_replica({"a"}, {"limit=2.5@1-2 0 1 2 3 4 5 6 7 "}, {1}) == 2);
  CHECK(threads_of_replica({"a"}, {"limit=0.5@1-2 0 1 2 3 "}, {1}) == 1);
  CHECK(threads_of_replica({"a"}, {"limit=16@1-2 0 1 2 3 "}, {1}) == 4);
  CHECK(threads_of_replica(one_host, {"limit=4@1-2 0 1 2 3 4 5 6 7 ", "limit=4@1-2 0 1 2 3 4 5 6 7 "}, {1, 1}) == 2);
  CHECK(threads_of_replica(one_host, {"limit=3@1-2 0 1 2 3 4 5 6 7 ", "limit=3@1-3 0 1 2 3 4 5 6 7 "}, {1, 1}) == 3);
  CHECK(threads_of_replica(one_host, {"limit=2@1-2 0 1 2 3 4 5 6 7 ", "0 1 2 3 4 5 6 7 "}, {1, 1}) == 4);
}

}  // namespace muster
