# Finds NCCL's header and library and defines the imported target muster::nccl.
#
# Looked for in this order: NCCL_ROOT (a CMake or environment variable: a folder with include/ and lib/), the
# nvidia-nccl wheel beside torch (MusterTorch_ROOT_DIR), and the system, the CUDA toolkit included.
# Sets MusterNccl_FOUND, MusterNccl_VERSION and MusterNccl_INCLUDE_DIR, MusterNccl_LIBRARY.

set(_hints "${NCCL_ROOT}" "$ENV{NCCL_ROOT}" "${MusterTorch_ROOT_DIR}/../nvidia/nccl" ${CUDAToolkit_LIBRARY_ROOT})
list(REMOVE_ITEM _hints "")

# One place gives both: a header of one version with a library of another would fail at run time.
foreach(_folder IN LISTS _hints ITEMS system)
  if(_folder STREQUAL "system")
    find_path(MusterNccl_INCLUDE_DIR NAMES nccl.h NO_CACHE)
    find_library(MusterNccl_LIBRARY NAMES nccl libnccl.so.2 NO_CACHE)
  else()
    find_path(MusterNccl_INCLUDE_DIR NAMES nccl.h PATHS "${_folder}" PATH_SUFFIXES include NO_DEFAULT_PATH NO_CACHE)
    find_library(MusterNccl_LIBRARY NAMES nccl libnccl.so.2 PATHS "${_folder}" PATH_SUFFIXES lib lib64 NO_DEFAULT_PATH
      NO_CACHE)
  endif()
  if(MusterNccl_INCLUDE_DIR AND MusterNccl_LIBRARY)
    break()
  endif()
  unset(MusterNccl_INCLUDE_DIR)
  unset(MusterNccl_LIBRARY)
endforeach()

if(MusterNccl_INCLUDE_DIR)
  set(_parts)
  foreach(_part MAJOR MINOR PATCH)
    file(STRINGS "${MusterNccl_INCLUDE_DIR}/nccl.h" _line REGEX "define NCCL_${_part} ")
    string(REGEX MATCH "[0-9]+" _number "${_line}")
    list(APPEND _parts ${_number})
  endforeach()
  list(JOIN _parts "." MusterNccl_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MusterNccl REQUIRED_VARS MusterNccl_LIBRARY MusterNccl_INCLUDE_DIR
  VERSION_VAR MusterNccl_VERSION
  REASON_FAILURE_MESSAGE "Install the nvidia-nccl wheel beside torch, or pass -DNCCL_ROOT=<folder with include/ and lib/>.")

# An interface, so that what muster exports does not ask its users for this target.
if(MusterNccl_FOUND AND NOT TARGET muster::nccl)
  add_library(muster::nccl INTERFACE IMPORTED)
  set_target_properties(muster::nccl PROPERTIES
    INTERFACE_LINK_LIBRARIES "${MusterNccl_LIBRARY}"
    INTERFACE_INCLUDE_DIRECTORIES "${MusterNccl_INCLUDE_DIR}")
endif()
