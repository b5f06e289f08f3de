// Snapshots of a job that has a secret.
#include <ATen/ops/full.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "checkpoint/crc32.h"
#include "checkpoint/sha256.h"
#include "checkpoint/snapshot.h"
#include "core/log.h"
#include "cpp/catch.h"
#include "cpp/checkpoint/texts.h"
#include "muster/error.h"
#include "net/job_secret.h"
#include "support/folder.h"
#include "support/run_ranks.h"

using namespace muster;
using namespace muster::checkpoint;
using testing::message_of;
namespace fs = std::filesystem;

using testing::contents;
using testing::replace;

namespace {

const net::JobSecret kSecret = "a secret of this test alone";
const net::JobSecret kOther = "another secret of this test";

struct Quiet {
  Quiet() {
    set_log_sink([this](LogLevel, const std::string& message) { text += message + '\n'; });
  }
  ~Quiet() { set_log_sink({}); }
  std::string text;
};

// MUSTER_SECRET_FILE, for as long as it lives.
struct SecretFile {
  explicit SecretFile(const std::string& text, fs::perms mode = fs::perms(0600)) {
    std::ofstream(folder.path / "secret") << text;
    fs::permissions(folder.path / "secret", mode);
    ::setenv("MUSTER_SECRET_FILE", (folder.path / "secret").c_str(), 1);
  }
  ~SecretFile() { ::unsetenv("MUSTER_SECRET_FILE"); }
  testing::Folder folder;
};

Snapshot signed_number(int64_t number) { return {{{"x", at::full({100}, number)}}, {{"number", number}}}; }

int64_t number_of(const Snapshot& snapshot) { return std::get<int64_t>(snapshot.metadata.at("number")); }

fs::path write(const fs::path& folder, int64_t number, const std::optional<net::JobSecret>& secret) {
  return write_snapshot(folder, signed_number(number), {.secret = secret});
}

std::string error_of(const fs::path& snapshot, const std::optional<net::JobSecret>& secret) {
  return message_of<CheckpointError>([&] { SnapshotReader(snapshot, secret).rest(); });
}

// The manifest with `from` replaced and a checksum that fits, as whoever lacks the secret could write it.
void forge(const fs::path& snapshot, const std::string& from, const std::string& to) {
  auto text = contents(snapshot / "manifest.json");
  const auto at = text.find(from);
  REQUIRE(at != std::string::npos);
  text.replace(at, from.size(), to);
  const auto begin = text.find("{\"version\"");
  const auto inner = text.substr(begin, text.rfind('}') - begin);
  char sum[9];
  std::snprintf(sum, sizeof(sum), "%08x", crc32(inner.data(), inner.size()));
  replace(snapshot / "manifest.json", text.replace(10, 8, sum));
}

}  // namespace

TEST_CASE("SHA-256 and HMAC are those of FIPS 180 and RFC 4231", "[checkpoint]") {
  if (!has_sha256()) return;
  Sha256 sum;
  sum.add("a", 1);
  CHECK(sum.digest() == "ca978112ca1bbdcafac231b39a23dc4da786eff8147c4e72b9807785afee48bb");
  sum.add("bc", 2);
  CHECK(sum.digest() == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(hex_of_digest(hmac_sha256("Jefe", "what do ya want for nothing?")) ==
        "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

TEST_CASE("a snapshot is read with the secret that signed it, and by those who have none", "[checkpoint]") {
  const testing::Folder folder;
  if (!has_sha256()) {
    CHECK_THROWS_AS(write(folder.path, 1, kSecret), NotBuilt);
    const auto path = write(folder.path, 1, {});
    CHECK_THROWS_AS(SnapshotReader(path, kSecret), NotBuilt);
    // One that was signed elsewhere is read by its CRC-32.
    const std::string digest(64, '0');
    forge(path, "\"}],\"tensors\"", "\",\"sha256\":\"" + digest + "\"}],\"tensors\"");
    forge(path, ",\"manifest\"", ",\"hmac\":\"" + digest + "\",\"manifest\"");
    CHECK(number_of(SnapshotReader(path, {}).rest()) == 1);
    return;
  }
  const auto path = write(folder.path, 1, kSecret);
  CHECK(number_of(SnapshotReader(path, kSecret).rest()) == 1);
  CHECK(number_of(SnapshotReader(path, {}).rest()) == 1);
  const auto message = error_of(path, kOther);
  CHECK_THAT(message,
             ContainsSubstring("'" + (path / "manifest.json").string() + "' was signed with another job secret"));
  CHECK_THAT(message, ContainsSubstring("muster checkpoint sign " + path.string()));

  const auto plain = write(folder.path, 2, {});
  CHECK_THAT(error_of(plain, kSecret), ContainsSubstring("has no signature, and a job secret is set"));
  CHECK(contents(plain / "manifest.json").find("sha256") == std::string::npos);
}

TEST_CASE("what somebody without the secret changes is refused", "[checkpoint]") {
  if (!has_sha256()) return;
  const testing::Folder folder;
  const auto path = write(folder.path, 1, kSecret);
  SECTION("the metadata") {
    forge(path, "\"number\":1", "\"number\":2");
    CHECK(number_of(SnapshotReader(path, {}).rest()) == 2);
    CHECK_THAT(error_of(path, kSecret), ContainsSubstring("changed by somebody who does not know it"));
  }
  SECTION("the signature is taken off") {
    auto text = contents(path / "manifest.json");
    replace(path / "manifest.json", text.erase(text.find("\"hmac\""), 64 + 10));
    CHECK(number_of(SnapshotReader(path, {}).rest()) == 1);
    CHECK_THAT(error_of(path, kSecret), ContainsSubstring("has no signature"));
  }
  SECTION("the digest is taken off") {
    auto text = contents(path / "manifest.json");
    forge(path, text.substr(text.find(",\"sha256\""), 64 + 12), "");
    CHECK_THAT(error_of(path, kSecret), ContainsSubstring("changed by somebody"));
  }
  SECTION("a shard of another snapshot") {
    const auto other = write(folder.path, 2, kSecret);
    fs::rename(other / "shard-00000.safetensors", path / "shard-00000.safetensors");
    CHECK_THROWS_AS(SnapshotReader(path, kSecret).rest(), CheckpointError);
  }
  SECTION("a digest that is not the shard's, whose CRC-32 is right") {
    const auto text = contents(path / "manifest.json");
    const auto at = text.find("\"sha256\":\"") + 10;
    forge(path, text.substr(at, 64), std::string(64, '0'));
    CHECK_THAT(error_of(path, {}), ContainsSubstring("its size or checksum is not that of the manifest"));
  }
}

TEST_CASE("a digest is 64 digits", "[checkpoint]") {
  if (!has_sha256()) return;
  const testing::Folder folder;
  const auto path = write(folder.path, 1, kSecret);
  const auto text = contents(path / "manifest.json");
  const auto where = GENERATE(std::string("\"hmac\":\""), std::string("\"sha256\":\""));
  const auto digest = text.substr(text.find(where) + where.size(), 64);
  const auto bad = GENERATE_COPY(digest.substr(1), digest + "0", std::string(64, 'A'), std::string());
  forge(path, digest, bad);
  CHECK_THAT(error_of(path, {}), ContainsSubstring("expected a digest of 64 hexadecimal digits"));
}

TEST_CASE("a snapshot that is trusted is signed in its place", "[checkpoint]") {
  const testing::Folder folder;
  const auto path = write_snapshot(folder.path, {signed_number(1).tensors, {{"number", int64_t{1}}, {"d", 0.1}}},
                                   {.shard_bytes = 1, .secret = std::nullopt});
  if (!has_sha256()) {
    CHECK_THROWS_AS(sign_snapshot(path, kSecret), NotBuilt);
    return;
  }
  const auto whole = read_snapshot(path);
  for (const auto& secret : {kSecret, kOther, kSecret}) {
    sign_snapshot(path, secret);
    const auto back = SnapshotReader(path, secret).rest();
    CHECK((back.metadata == whole.metadata));
    CHECK(back.tensors.at("x").equal(whole.tensors.at("x")));
  }
  CHECK_THROWS_AS(SnapshotReader(path, kOther), CheckpointError);
  // What is damaged is not.
  auto text = contents(path / "shard-00000.safetensors");
  text.back() ^= 1;
  replace(path / "shard-00000.safetensors", text);
  const auto before = contents(path / "manifest.json");
  CHECK_THROWS_WITH(sign_snapshot(path, kOther), ContainsSubstring("shard-00000.safetensors' is damaged"));
  CHECK(contents(path / "manifest.json") == before);
}

TEST_CASE("of several, those that are not signed are passed over by name, and do not count as kept", "[checkpoint]") {
  if (!has_sha256()) return;
  const testing::Folder folder;
  const SecretFile file(kSecret + "\n");
  const auto first = write_snapshot(folder.path, signed_number(1), {});
  write(folder.path, 2, kOther);
  const auto third = write(folder.path, 3, {});
  {
    const Quiet log;
    const auto found = read_newest_snapshot(folder.path);
    REQUIRE(found);
    CHECK((number_of(*found) == 1 && found->folder == first));
    CHECK_THAT(log.text, ContainsSubstring("snapshot-0000000002' is passed over"));
    CHECK_THAT(log.text, ContainsSubstring("snapshot-0000000003' is passed over"));
    CHECK(list_snapshots(folder.path).size() == 1);
  }
  sign_snapshot(third, kSecret);
  CHECK(number_of(*read_newest_snapshot(folder.path)) == 3);
}

TEST_CASE("where none is signed, nothing begins anew", "[checkpoint]") {
  if (!has_sha256()) return;
  const testing::Folder folder;
  const Quiet log;
  write(folder.path, 1, {});
  const SecretFile file(kSecret);
  CHECK_THROWS_WITH(read_newest_snapshot(folder.path), ContainsSubstring("no snapshot in"));
  CHECK_THROWS_WITH(list_snapshots(folder.path), ContainsSubstring("no snapshot in"));
}

TEST_CASE("the job's secret is in a file that its owner alone may read", "[checkpoint][secret]") {
  CHECK_FALSE(net::job_secret());
  {
    const SecretFile file("  " + kSecret + " \n\n");
    CHECK(net::job_secret() == kSecret);
  }
  const auto refused = [](const std::string& words) {
    const auto message = message_of<InvalidArgument>([] { net::job_secret(); });
    CHECK_THAT(message, ContainsSubstring("MUSTER_SECRET_FILE='"));
    CHECK_THAT(message, ContainsSubstring(words));
  };
  for (const auto mode : {0640, 0604, 0620}) {
    const SecretFile file(kSecret, fs::perms(mode));
    refused("chmod 600");
  }
  {
    const SecretFile file("fifteen bytes..\n");
    refused("at least 16 bytes");
  }
  {
    const SecretFile file(std::string(4097, 'x'));
    refused("longer than 4096");
  }
  {
    const SecretFile file(kSecret);
    ::setenv("MUSTER_SECRET_FILE", file.folder.path.c_str(), 1);
    refused("not a regular file");
    ::setenv("MUSTER_SECRET_FILE", (file.folder.path / "none").c_str(), 1);
    refused("No such file");
    ::setenv("MUSTER_SECRET_FILE", "", 1);
    CHECK_FALSE(net::job_secret());
  }
}
