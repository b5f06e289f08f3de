# libdeflate: checkpoint/crc32.cpp where MUSTER_LIBDEFLATE can be honoured, else checkpoint/crc32_by_zlib.cpp, which is
# several times slower. Linked statically where that library is found, so that a wheel does not need it.
#
# Sets MUSTER_HAS_LIBDEFLATE and MUSTER_LIBDEFLATE_LIBRARIES.

muster_auto_option(MUSTER_LIBDEFLATE "Fast checksums of checkpoints, by libdeflate")

set(MUSTER_HAS_LIBDEFLATE OFF)
set(MUSTER_LIBDEFLATE_LIBRARIES)
if(NOT MUSTER_LIBDEFLATE STREQUAL "OFF")
  find_path(MUSTER_LIBDEFLATE_INCLUDE libdeflate.h) # Debian: libdeflate-dev
  find_library(MUSTER_LIBDEFLATE_LIBRARY NAMES libdeflate.a deflate)
  if(MUSTER_LIBDEFLATE_INCLUDE AND MUSTER_LIBDEFLATE_LIBRARY)
    set(MUSTER_HAS_LIBDEFLATE ON)
    set(MUSTER_LIBDEFLATE_LIBRARIES "${MUSTER_LIBDEFLATE_LIBRARY}")
    message(STATUS "libdeflate in ${MUSTER_LIBDEFLATE_LIBRARY}")
  elseif(MUSTER_LIBDEFLATE STREQUAL "ON")
    message(FATAL_ERROR "MUSTER_LIBDEFLATE is ON, and libdeflate was not found (Debian: libdeflate-dev, or pass -DCMAKE_PREFIX_PATH).")
  else()
    message(STATUS "libdeflate left out: it was not found (install libdeflate-dev, or pass -DCMAKE_PREFIX_PATH)")
  endif()
endif()

# Takes out of the list of sources what is not to be built.
function(muster_choose_crc32 sources)
  if(MUSTER_HAS_LIBDEFLATE)
    list(FILTER ${sources} EXCLUDE REGEX "/checkpoint/crc32_by_zlib\\.cpp$")
  else()
    list(FILTER ${sources} EXCLUDE REGEX "/checkpoint/crc32\\.cpp$")
  endif()
  set(${sources} "${${sources}}" PARENT_SCOPE)
endfunction()
