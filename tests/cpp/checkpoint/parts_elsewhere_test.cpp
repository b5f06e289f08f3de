// Snapshots of ranks on hosts that do not see one another's folders.
#include "checkpoint/parts_elsewhere.h"

#include <algorithm>
#include <string>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "cpp/catch.h"
#include "cpp/checkpoint/joint_job.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;

namespace {

// Two hosts with two ranks each.
struct TwoHosts {
  explicit TwoHosts(const SnapshotOptions& options = {})
      : job({chiefs.path, chiefs.path, other.path, other.path}, options, c10::make_intrusive<c10d::HashStore>()) {}

  void save() {
    REQUIRE(job.copy());
    job.write_all();
  }

  const testing::Folder chiefs;
  const testing::Folder other;
  Job job;
};

const std::string kFirst = "snapshot-0000000001";
const std::string kSecond = "snapshot-0000000002";

std::ptrdiff_t count_with(const std::vector<std::string>& names, const std::string& begin, const std::string& end) {
  return std::ranges::count_if(names,
                               [&](const std::string& name) { return name.starts_with(begin) && name.ends_with(end); });
}

}  // namespace

TEST_CASE("hosts that see no common folder write a part each, which are a snapshot in one folder", "[checkpoint]") {
  SnapshotOptions options;
  options.secret = GENERATE(std::optional<net::JobSecret>(), std::optional<net::JobSecret>("a secret of this test"));
  TwoHosts hosts(options);
  hosts.save();
  const auto path = hosts.chiefs.path / kFirst;
  CHECK(hosts.job.writers[0]->written() == path);
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kFirst});
  const auto there = names_in(hosts.other.path / kFirst);
  for (const auto* const writer : {"worker-2-", "worker-3-"}) {
    CHECK(count_with(there, writer, ".safetensors") == 1);
    CHECK(count_with(there, writer, ".part.json") == 1);
  }
  CHECK(there.size() == 4);
  for (const auto& name : names_in(path)) {
    CHECK((name == "manifest.json" || name.starts_with("worker-0-") || name.starts_with("worker-1-")));
  }
  const SnapshotReader manifest(path, options.secret);
  for (const auto& [file, sum, host] : manifest.shards()) {
    CHECK(host == (file.starts_with("worker-2-") || file.starts_with("worker-3-") ? host_name() : ""));
  }
  const auto error = message_of<CheckpointError>([&] { SnapshotReader(path, options.secret).rest(); });
  CHECK(error.find("worker-2-") != std::string::npos);
  CHECK(error.find("was written on host '" + host_name() + "'") != std::string::npos);
  CHECK_THROWS_WITH(SnapshotReader(hosts.other.path / kFirst, options.secret), ContainsSubstring("one host's part"));
  fs::copy(hosts.other.path / kFirst, path, fs::copy_options::recursive);
  CHECK(are_equal(SnapshotReader(path, options.secret).rest(), whole()));
}

TEST_CASE("what all ranks have is on the chief's host alone", "[checkpoint]") {
  TwoHosts hosts;
  std::vector<JointContent> contents;
  for (int rank = 0; rank < 4; ++rank) {
    contents.push_back(content_of(rank, 4));
    contents.back().divided.clear();
  }
  REQUIRE(hosts.job.copy(contents));
  hosts.job.write_all();
  auto expected = whole();
  expected.tensors.erase("divided");
  CHECK(are_equal(read_snapshot(hosts.chiefs.path / kFirst), expected));
  CHECK(names_in(hosts.other.path).empty());
}

TEST_CASE("a host whose part cannot be written is named, and leaves nothing", "[checkpoint]") {
  TwoHosts hosts;
  const int failing = GENERATE(2, 3);
  REQUIRE(hosts.job.copy());
  fs::create_directories(hosts.job.file_of(failing, hosts.other.path));
  for (int rank = 0; rank < 4; ++rank) hosts.job.start(rank);
  const auto chiefs = hosts.job.error_of(0);
  CHECK(chiefs.find("worker-" + std::to_string(failing) + "-") != std::string::npos);
  CHECK(chiefs.find("could not write its part: ") != std::string::npos);
  CHECK(hosts.job.error_of(failing).find("-00000.safetensors") != std::string::npos);
  for (const auto& writer : hosts.job.writers) writer->wait();
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock"});
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock"});
  hosts.save();
  fs::copy(hosts.other.path / kFirst, hosts.chiefs.path / kFirst, fs::copy_options::recursive);
  CHECK(are_equal(read_snapshot(hosts.chiefs.path / kFirst), whole()));
}

TEST_CASE("the chief waits for another host as long as that gets on", "[checkpoint]") {
  TwoHosts hosts;
  REQUIRE(hosts.job.copy());
  hosts.job.start(1);
  hosts.job.start(0, milliseconds(200));
  const auto chiefs = hosts.job.error_of(0);
  CHECK(chiefs.find("worker-2-") != std::string::npos);
  CHECK(chiefs.find("have written nothing of their parts") != std::string::npos);
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("parts of a snapshot that the chief did not finish are none, and its number is not used again",
          "[checkpoint]") {
  TwoHosts hosts;
  hosts.save();
  REQUIRE(hosts.job.copy());
  for (int rank = 1; rank < 4; ++rank) hosts.job.start(rank);
  for (int rank = 1; rank < 4; ++rank) hosts.job.writers[static_cast<size_t>(rank)]->wait();
  hosts.job.joints[0] = nullptr;  // which takes the draft away, as the next writer would do for a dead chief
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kFirst, kSecond});
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock", kFirst});
  hosts.save();
  CHECK(hosts.job.writers[0]->written().filename() == "snapshot-0000000003");
}

TEST_CASE("hosts remove what the chief has no longer, once the next snapshot is begun", "[checkpoint]") {
  TwoHosts hosts({.keep = 1});
  for (int time = 0; time < 3; ++time) hosts.save();
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock", "snapshot-0000000003"});
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kSecond, "snapshot-0000000003"});
}
