// The error types of Muster. Every error that Muster raises derives from muster::Error; Python has the same
// names, each also a subclass of the built-in exception a Python user would catch.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace muster {

/// Base of all errors. The message says what happened, where (rank, bucket, parameter) and what to do.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// An argument, option or environment that cannot be honoured; found before any work is done.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};

/// Ranks disagree about what they communicate: size, dtype, operation, model or layout.
class LayoutMismatch : public Error {
 public:
  using Error::Error;
};

/// Communication failed; also the base of PeerLost and Timeout. After it the communicator is unusable.
class CommError : public Error {
 public:
  using Error::Error;
};

/// A peer died or left.
class PeerLost : public CommError {
 public:
  /// Says that worker `rank` was lost.
  PeerLost(int rank, const std::string& message) : CommError(message), rank_(rank) {}
  int rank() const noexcept { return rank_; }  ///< the worker that was lost

 private:
  int rank_;
};

/// A live peer did not arrive within the deadline.
class Timeout : public CommError {
 public:
  using CommError::CommError;
};

/// Another replica's step raised. The window is dropped everywhere and the strategy stays usable.
class RemoteError : public Error {
 public:
  /// Says what replica `replica` of worker `rank` raised.
  RemoteError(int rank, int replica, std::string type, std::string text, const std::string& message)
      : Error(message), rank_(rank), replica_(replica), type_(std::move(type)), text_(std::move(text)) {}
  int rank() const noexcept { return rank_; }                 ///< the worker whose step raised
  int replica() const noexcept { return replica_; }           ///< its job-wide replica index
  const std::string& type() const noexcept { return type_; }  ///< the exception's type there
  const std::string& text() const noexcept { return text_; }  ///< its message there

 private:
  int rank_;
  int replica_;
  std::string type_;
  std::string text_;
};

/// Gradients were not finite for `max_skipped` windows in a row.
class NonFinite : public Error {
 public:
  using Error::Error;
};

/// A checkpoint is missing, damaged or of another shape.
class CheckpointError : public Error {
 public:
  using Error::Error;
};

/// A peer could not prove that it belongs to the job.
class AuthError : public Error {
 public:
  using Error::Error;
};

/// The capability was left out of this build; the message names what to rebuild with.
class NotBuilt : public Error {
 public:
  using Error::Error;
};

}  // namespace muster
