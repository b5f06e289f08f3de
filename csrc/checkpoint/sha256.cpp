#include "checkpoint/sha256.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include "muster/error.h"

namespace muster::checkpoint {

namespace {

constexpr unsigned kDigestBytes = 32;

using Context = std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>;

Context new_context() { return {EVP_MD_CTX_new(), EVP_MD_CTX_free}; }

// OpenSSL fails where memory does, or where its configuration forbids the algorithm.
void require(bool is_done) {
  if (!is_done) throw CheckpointError("OpenSSL computes no SHA-256; check its configuration and the free memory");
}

}  // namespace

struct Sha256::State {
  Context context = new_context();
};

bool has_sha256() noexcept { return true; }

Sha256::Sha256() : state_(std::make_unique<State>()) {
  require(state_->context != nullptr && EVP_DigestInit_ex(state_->context.get(), EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() = default;

void Sha256::add(const void* data, size_t bytes) { require(EVP_DigestUpdate(state_->context.get(), data, bytes) == 1); }

std::string Sha256::digest() const {
  const auto copy = new_context();  // what is ended takes no more
  unsigned char bytes[EVP_MAX_MD_SIZE];
  require(copy != nullptr && EVP_MD_CTX_copy_ex(copy.get(), state_->context.get()) == 1 &&
          EVP_DigestFinal_ex(copy.get(), bytes, nullptr) == 1);
  return hex_of_digest({reinterpret_cast<const char*>(bytes), kDigestBytes});
}

std::string hmac_sha256(std::string_view key, std::string_view text) {
  unsigned char bytes[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  require(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
               reinterpret_cast<const unsigned char*>(text.data()), text.size(), bytes, &length) != nullptr &&
          length == kDigestBytes);
  return {reinterpret_cast<const char*>(bytes), kDigestBytes};
}

std::string hex_of_digest(std::string_view digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

}  // namespace muster::checkpoint
