// What the processes of a job know, and nobody else.
#pragma once

#include <optional>
#include <string>

namespace muster::net {

using JobSecret = std::string;

/// What is in the file that MUSTER_SECRET_FILE names, without white space around it; nothing where that is not set, or
/// empty. Read anew each time. Throws InvalidArgument where the file cannot be read, others than its owner may read or
/// write it, or it holds fewer than 16 bytes, or more than 4096.
std::optional<JobSecret> job_secret();

}  // namespace muster::net
