// SHA-256, and HMAC with it, of OpenSSL.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace muster::checkpoint {

/// Whether this build has OpenSSL. Without it all else here throws NotBuilt.
bool has_sha256() noexcept;

/// Of what is added, piece by piece. Owned by one thread.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void add(const void* data, size_t bytes);
  /// Of all so far, as 64 hexadecimal digits.
  std::string digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view text);

/// As 64 hexadecimal digits.
std::string hex_of_digest(std::string_view digest);

}  // namespace muster::checkpoint
