#include "checkpoint/joint_snapshot.h"

#include <ATen/ops/zeros.h>

#include <string>
#include <vector>

#include "cpp/catch.h"
#include "cpp/checkpoint/joint_job.h"
#include "support/folder.h"

using namespace muster;
using namespace muster::testing;

TEST_CASE("each element of tensors that all ranks have is written by one of them", "[checkpoint]") {
  const auto tensors = alike();
  uint64_t all = 0;
  for (const auto& [name, tensor] : tensors) all += tensor.nbytes();
  const int ranks = GENERATE(2, 3, 7);
  const uint64_t chiefs = GENERATE(uint64_t{0}, uint64_t{1'000'000}, uint64_t{1} << 40);
  std::map<std::string, int64_t> next;
  std::vector<uint64_t> bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    bytes.push_back(rank == 0 ? chiefs : 0);
    for (const auto& run : share_of(tensors, rank, ranks, chiefs)) {
      CHECK(run.begin == next[run.name]);
      CHECK(run.elements.flatten().equal(
          tensors.at(run.name).flatten().slice(0, run.begin, run.begin + run.elements.numel())));
      next[run.name] += run.elements.numel();
      bytes.back() += run.elements.nbytes();
    }
  }
  CHECK(next.size() == tensors.size());
  for (const auto& [name, tensor] : tensors) CHECK(next.at(name) == tensor.numel());
  // The matrix with gaps is not cut: 2.4 MB.
  const uint64_t least = chiefs > all ? 0 : (all + chiefs) / static_cast<uint64_t>(ranks);
  for (size_t rank = chiefs > all ? 1 : 0; rank < bytes.size(); ++rank) {
    CHECK(bytes[rank] <= std::max(least, all / static_cast<uint64_t>(ranks - 1)) + 2'500'000);
  }
}

TEST_CASE("what ranks write together is what one writes alone", "[checkpoint]") {
  const testing::Folder folder;
  const testing::Folder of_one;
  SnapshotOptions options{.keep = 1};
  options.secret = GENERATE(std::optional<net::JobSecret>(), std::optional<net::JobSecret>("a secret of this test"));
  JointJob job(std::vector<fs::path>(GENERATE(size_t{2}, size_t{3}), folder.path), options);
  for (int time = 1; time <= 2; ++time) {
    REQUIRE(job.copy());
    job.write_all();
    CHECK(job.writers.front()->written() == folder.path / ("snapshot-000000000" + std::to_string(time)));
  }
  CHECK(job.writers.back()->written().empty());
  const auto path = job.writers.front()->written();
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock", path.filename()});
  for (const auto& name : names_in(path)) {
    CHECK((name == "manifest.json" || (name.starts_with("worker-") && name.ends_with(".safetensors"))));
  }
  CHECK(names_in(path).size() == job.writers.size() + 1);
  SnapshotReader reader(path, options.secret);
  const auto alone = write_snapshot(of_one.path, whole(), options);
  CHECK(are_equal(reader.rest(), SnapshotReader(alone, options.secret).rest()));
}

TEST_CASE("ranks copy what they write, and no more", "[checkpoint]") {
  const testing::Folder folder;
  JointJob job({folder.path, folder.path});
  auto contents = std::vector<JointContent>{content_of(0, 2), content_of(1, 2)};
  for (auto& content : contents) content.alike["a/large"] = at::zeros({300'001});
  REQUIRE(job.copy(contents));
  for (auto& content : contents) content.alike["a/large"].fill_(1);
  job.write_all();
  CHECK(read_snapshot(job.writers.front()->written()).tensors.at("a/large").equal(at::zeros({300'001})));
}

TEST_CASE("ranks that do not see the chief's folder, or have other tensors, write nothing", "[checkpoint]") {
  const testing::Folder folder;
  const testing::Folder other;
  SECTION("another folder") {
    JointJob job({folder.path, folder.path, other.path});
    CHECK_FALSE(job.copy());
  }
  SECTION("another tensor") {
    JointJob job({folder.path, folder.path});
    std::vector<JointContent> contents{content_of(0, 2), content_of(1, 2)};
    const auto what = GENERATE("name", "shape", "dtype", "gaps", "values", "an element");
    auto& tensors = contents[1].alike;
    if (what == std::string("name")) tensors["more"] = at::zeros({1});
    if (what == std::string("shape")) tensors["a/large"] = at::zeros({300'002});
    if (what == std::string("dtype")) tensors["a/large"] = at::zeros({300'001}, at::kInt);
    if (what == std::string("gaps")) tensors["b/gaps"] = tensors["b/gaps"].contiguous();
    if (what == std::string("values")) tensors["b/gaps"] = tensors["b/gaps"] + 1;
    if (what == std::string("an element")) {
      tensors["a/large"] = tensors["a/large"].clone();
      tensors["a/large"][123'457] += 1;
    }
    CHECK_FALSE(job.copy(contents));
  }
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
  CHECK(names_in(other.path).empty());
}

TEST_CASE("a rank that cannot write says so, and the chief names it; then the job goes on", "[checkpoint]") {
  const testing::Folder folder;
  JointJob job({folder.path, folder.path, folder.path});
  const int failing = GENERATE(0, 1);
  REQUIRE(job.copy());
  fs::create_directories(job.file_of(failing, folder.path));
  for (int rank = 0; rank < 3; ++rank) job.start(rank);
  CHECK(job.error_of(failing).find("-00000.safetensors") != std::string::npos);
  if (failing == 1) {
    const auto chiefs = job.error_of(0);
    CHECK(chiefs.find("worker-1-") != std::string::npos);
    CHECK(chiefs.find("could not write its part: ") != std::string::npos);
  }
  for (const auto& writer : job.writers) writer->wait();  // all else went well
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
  REQUIRE(job.copy());
  job.write_all();
  CHECK(are_equal(read_snapshot(job.writers.front()->written()), whole()));
}

TEST_CASE("the chief does not wait for a rank that is dead, nor for ever", "[checkpoint]") {
  const testing::Folder folder;
  JointJob job({folder.path, folder.path, folder.path});
  REQUIRE(job.copy());
  const bool is_dead = GENERATE(false, true);
  job.start(1);
  job.writers[1]->wait();                // its part is there: the chief takes the draft away
  if (is_dead) job.joints[2] = nullptr;  // which drops the lock, as the system does for a process
  job.start(0, is_dead ? milliseconds(600'000) : milliseconds(50));
  const auto chiefs = job.error_of(0);
  CHECK(chiefs.find("worker-2-") != std::string::npos);
  CHECK(chiefs.find(is_dead ? "died before it had written its part" : "has written nothing of its part") !=
        std::string::npos);
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("a rank that still writes for another snapshot than this one fails", "[checkpoint]") {
  const testing::Folder folder;
  JointJob dead({folder.path, folder.path});
  REQUIRE(dead.copy());
  auto late = std::move(dead.joints[1]);
  dead.joints.clear();
  dead.writers[0] = nullptr;
  JointJob job({folder.path, folder.path});
  REQUIRE(job.copy());
  late->start({}, milliseconds(60'000));
  CHECK_THROWS_WITH(dead.writers[1]->wait(), ContainsSubstring("is gone"));
  job.write_all();
  CHECK(are_equal(read_snapshot(job.writers.front()->written()), whole()));
}

TEST_CASE("a snapshot that the ranks gave up leaves nothing", "[checkpoint]") {
  const testing::Folder folder;
  JointJob job({folder.path, folder.path});
  REQUIRE(job.copy());
  job.joints.clear();
  CHECK(names_in(folder.path) == std::vector<std::string>{"life", "lock"});
}

TEST_CASE("what cannot be stored is refused before anything is copied", "[checkpoint]") {
  const testing::Folder folder;
  SnapshotWriter writer(folder.path, {});
  JointSnapshot joint(writer, 0);
  const auto announced = joint.announce();
  const auto complex = at::zeros({2}, at::kComplexDouble);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.chiefs = {{"a", complex}}}), InvalidArgument);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.alike = {{"a", complex}}}), InvalidArgument);
  CHECK_THROWS_AS(joint.look({announced, ""}, {.divided = {Run::whole("a", complex)}}), InvalidArgument);
}
