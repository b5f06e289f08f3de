// Snapshots of ranks on hosts that do not see one another's folders.
#include "checkpoint/parts_elsewhere.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

#include "checkpoint/manifest.h"
#include "core/log.h"
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

  // Of what the ranks have told.
  int64_t num_keys() const { return job.store->getNumKeys(); }

  const testing::Folder chiefs;
  const testing::Folder other;
  JointJob job;
};

struct Said {
  Said() {
    set_log_sink([this](LogLevel, const std::string& message) {
      const std::lock_guard lock(mutex);
      texts.push_back(message);
    });
  }
  ~Said() { set_log_sink({}); }

  std::ptrdiff_t count(const std::string& words) {
    const std::lock_guard lock(mutex);
    return std::ranges::count_if(texts, [&](const std::string& text) { return text.find(words) != std::string::npos; });
  }

  std::mutex mutex;
  std::vector<std::string> texts;
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
  fs::create_directories(hosts.job.file_of(failing, hosts.other.path, "away"));
  for (int rank = 0; rank < 4; ++rank) hosts.job.start(rank);
  const auto chiefs = hosts.job.error_of(0);
  CHECK(chiefs.find("worker-" + std::to_string(failing) + "-") != std::string::npos);
  CHECK(chiefs.find("could not write its part: ") != std::string::npos);
  CHECK(hosts.job.error_of(failing).find("-00000.safetensors") != std::string::npos);
  for (const auto& writer : hosts.job.writers) writer->wait();
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock"});
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock"});
  CHECK(hosts.num_keys() == 0);
  hosts.save();
  CHECK(hosts.num_keys() == 0);
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
  CHECK(chiefs.find("has written nothing of its part") != std::string::npos);
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

TEST_CASE("hosts remove what the chief has no longer, once there is another", "[checkpoint]") {
  TwoHosts hosts({.keep = 1});
  for (int time = 0; time < 2; ++time) hosts.save();
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kFirst, kSecond});
  REQUIRE(hosts.job.copy());
  CHECK(fs::exists(hosts.other.path / kFirst));
  hosts.job.write_all();
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock", "snapshot-0000000003"});
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kSecond, "snapshot-0000000003"});
}

TEST_CASE("hosts keep parts of the last good snapshot beside a newer one that is damaged", "[checkpoint]") {
  TwoHosts hosts({.keep = 1});
  hosts.save();
  fs::create_directory(hosts.chiefs.path / kSecond);
  std::ofstream(hosts.chiefs.path / kSecond / "manifest.json") << "damaged";
  REQUIRE(hosts.job.copy());
  for (int rank = 1; rank < 4; ++rank) hosts.job.start(rank);
  for (int rank = 1; rank < 4; ++rank) hosts.job.writers[static_cast<size_t>(rank)]->wait();
  hosts.job.joints[0] = nullptr;  // as a chief that is dead
  CHECK(names_in(hosts.other.path) == std::vector<std::string>{"life", "lock", kFirst, "snapshot-0000000003"});
}

TEST_CASE("a host whose folder is not there has no parts, and does not make it", "[checkpoint]") {
  TwoHosts hosts;
  fs::remove_all(hosts.other.path);
  CHECK_FALSE(hosts.job.copy());
  CHECK_FALSE(fs::exists(hosts.other.path));
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock"});
  fs::create_directory(hosts.other.path);
  hosts.save();
  CHECK(fs::exists(hosts.other.path / kFirst));
}

TEST_CASE("hosts keep snapshots of their own, and parts of other lineages", "[checkpoint]") {
  TwoHosts hosts({.keep = 1});
  hosts.save();
  hosts.job.lineage = "2b";
  write_snapshot(hosts.other.path, whole(), {});
  for (int time = 0; time < 3; ++time) hosts.save();
  const std::vector<std::string> expected{
      "life", "lock", kFirst, kSecond, "snapshot-0000000004", "snapshot-0000000005"};
  CHECK(names_in(hosts.other.path) == expected);  // and nothing of the third
  CHECK(names_in(hosts.chiefs.path) == std::vector<std::string>{"life", "lock", "snapshot-0000000005"});
  CHECK(fs::exists(hosts.other.path / kSecond / "manifest.json"));
}

TEST_CASE("where another process uses the folder of a host the chief writes alone, above all numbers", "[checkpoint]") {
  TwoHosts hosts;
  for (int number = 0; number < 4; ++number) write_snapshot(hosts.other.path, whole(), {});
  Said said;
  {
    SnapshotWriter another(hosts.other.path, {});
    another.claim();
    CHECK_FALSE(hosts.job.copy());
    CHECK(said.count("another process uses the folder '" + hosts.chiefs.path.string() + "' on host '" + host_name()) ==
          1);
    hosts.job.writers[0]->write_copy(whole());
    hosts.job.writers[0]->wait();
    CHECK(hosts.job.writers[0]->written().filename() == "snapshot-0000000005");
  }
  for (const auto& name : names_in(hosts.other.path)) CHECK_FALSE(name.starts_with("."));
  for (int time = 0; time < 2; ++time) hosts.save();
  CHECK(hosts.job.writers[0]->written().filename() == "snapshot-0000000007");
}

TEST_CASE("who sees the chief's folder as it was does not write there", "[checkpoint]") {
  const testing::Folder folder;
  JointJob job({folder.path, folder.path, folder.path}, {}, c10::make_intrusive<c10d::HashStore>());
  Said said;
  CHECK_FALSE(job.copy([&] {
    for (const auto& entry : fs::directory_iterator(folder.path / job.draft())) fs::remove(entry.path());
  }));
  CHECK(said.count("mount it with the options") == 1);  // once in a process
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("the chief's log says once that other hosts have parts", "[checkpoint]") {
  TwoHosts hosts;
  Said said;
  for (int time = 0; time < 2; ++time) hosts.save();
  CHECK(said.count("have parts on the disks of other hosts ('" + host_name() + "')") == 1);
}

TEST_CASE("the chief is told how many bytes a host has written, and then where the parts are", "[checkpoint]") {
  const testing::Folder folder;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const WordOfHost word(store, "worker-2-1234abcd");
  std::map<std::string, std::string> hosts;
  const auto awaited = word.awaited(folder.path, hosts);
  CHECK(awaited.progress() == 0);
  std::ofstream(folder.path / "worker-3-1234abcd-00000.safetensors") << std::string(1000, 'x');
  {
    const ProgressTeller teller(WordOfHost(client_for_thread(store), "worker-2-1234abcd"),
                                [&] { return written_by(folder.path, "worker-3-1234abcd"); });
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (awaited.progress() != 1000 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    CHECK(awaited.progress() == 1000);
  }
  CHECK(hosts.empty());
  const std::string manifest((size_t{1} << 20) + 5, 'm');  // in two pieces
  word.tell_parts({{"worker-2-1234abcd", "short"}, {"worker-3-1234abcd", manifest}});
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!awaited.is_there() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  CHECK(hosts ==
        std::map<std::string, std::string>{{"worker-2-1234abcd", host_name()}, {"worker-3-1234abcd", host_name()}});
  CHECK(part_text(folder.path, "worker-3-1234abcd") == manifest);
  word.forget();
  CHECK(store->getNumKeys() == 0);
}

TEST_CASE("what a host tells of a snapshot that the chief has given up is removed", "[checkpoint]") {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const WordOfHost word(store, "worker-2-1234abcd");
  const bool is_told_first = GENERATE(true, false);
  if (!is_told_first) word.give_up();
  word.tell_progress(7);
  if (GENERATE(true, false)) {
    word.tell_parts({{"worker-2-1234abcd", "text"}});
  } else {
    word.tell_failure("no space");
  }
  if (is_told_first) word.give_up();
  CHECK(store->getNumKeys() == 0);
}

TEST_CASE("who tells of parts does not wait for a store that stands still", "[checkpoint]") {
  struct StillStore : c10d::HashStore {
    bool check(const std::vector<std::string>& /*keys*/) override {
      const std::lock_guard lock(goes_on);
      return false;
    }
    std::mutex goes_on;
  };
  const auto store = c10::make_intrusive<StillStore>();
  const WordOfHost word(store, "worker-2-1234abcd", std::chrono::milliseconds(100));
  const std::lock_guard stands_still(store->goes_on);
  CHECK_THROWS_WITH(word.tell_parts({{"worker-2-1234abcd", "text"}}), ContainsSubstring("has not answered"));
  CHECK_THROWS_WITH(word.tell_failure("no space"), ContainsSubstring("has not answered"));
}

TEST_CASE("a manifest's hosts have names that can be printed", "[checkpoint]") {
  const auto read = [](const std::string& host) {
    const Manifest manifest{{}, {{"worker-1-00000.safetensors", {}, host}}, {}};
    return parse_manifest(manifest_of(manifest, {}), "manifest.json", {}).shards.front().host;
  };
  for (const auto& host : {std::string("node-b"), std::string("~ !"), std::string(255, 'h')}) CHECK(read(host) == host);
  for (const auto& host :
       {std::string("a\x1b[2J"), std::string("a\nb"), std::string("\xc3\xa9"), std::string(256, 'h')}) {
    CHECK_THROWS_WITH(read(host), ContainsSubstring("what is no name of a host"));
  }
}
