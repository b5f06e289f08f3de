// sha256.h of a build without OpenSSL.
#include "checkpoint/sha256.h"
#include "muster/error.h"

namespace muster::checkpoint {
namespace {

[[noreturn]] void not_built() {
  throw NotBuilt(
      "a job secret is set (MUSTER_SECRET_FILE), and this build of muster has no OpenSSL to sign checkpoints with: "
      "rebuild it with -DMUSTER_OPENSSL=ON, where OpenSSL's headers are installed (Debian: libssl-dev), or unset the "
      "secret");
}

}  // namespace

struct Sha256::State {};

bool has_sha256() noexcept { return false; }

Sha256::Sha256() { not_built(); }
Sha256::~Sha256() = default;
void Sha256::add(const void*, size_t) { not_built(); }
std::string Sha256::digest() const { not_built(); }
std::string hmac_sha256(std::string_view, std::string_view) { not_built(); }
std::string hex_of_digest(std::string_view) { not_built(); }

}  // namespace muster::checkpoint
