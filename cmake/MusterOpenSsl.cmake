# OpenSSL: checkpoint/sha256.cpp where MUSTER_OPENSSL can be honoured, else the stub checkpoint/no_sha256.cpp. Not
# installed: users of muster need no headers of it.
#
# Sets MUSTER_HAS_OPENSSL and MUSTER_OPENSSL_LIBRARIES.

muster_auto_option(MUSTER_OPENSSL "Signed checkpoints, by OpenSSL")

set(MUSTER_HAS_OPENSSL OFF)
set(MUSTER_OPENSSL_LIBRARIES)
if(NOT MUSTER_OPENSSL STREQUAL "OFF")
  find_package(OpenSSL 1.1.1 QUIET COMPONENTS Crypto) # Debian: libssl-dev
  if(OpenSSL_FOUND)
    set(MUSTER_HAS_OPENSSL ON)
    set(MUSTER_OPENSSL_LIBRARIES OpenSSL::Crypto)
    message(STATUS "OpenSSL ${OPENSSL_VERSION} in ${OPENSSL_CRYPTO_LIBRARY}")
  elseif(MUSTER_OPENSSL STREQUAL "ON")
    message(FATAL_ERROR "MUSTER_OPENSSL is ON, and OpenSSL was not found (Debian: libssl-dev, or pass -DOPENSSL_ROOT_DIR).")
  else()
    message(STATUS "OpenSSL left out: it was not found (install libssl-dev, or pass -DOPENSSL_ROOT_DIR)")
  endif()
endif()

# Takes out of the list of sources what is not to be built.
function(muster_choose_sha256 sources)
  if(MUSTER_HAS_OPENSSL)
    list(FILTER ${sources} EXCLUDE REGEX "/checkpoint/no_sha256\\.cpp$")
  else()
    list(FILTER ${sources} EXCLUDE REGEX "/checkpoint/sha256\\.cpp$")
  endif()
  set(${sources} "${${sources}}" PARENT_SCOPE)
endfunction()
