# Finds LibTorch and defines the imported targets muster::torch and, where LibTorch comes from a Python installation,
# muster::torch_python, and, where it is a CUDA build, muster::torch_c10_cuda. Torch's own TorchConfig.cmake asks a CUDA
# build of torch for the CUDA toolkit; this needs none.
#
# Looked for in this order: MusterTorch_ROOT (a folder with include/ and lib/), Torch_DIR, the folder beside an
# installed muster package, CMAKE_PREFIX_PATH, and the torch of the Python interpreter (Python_EXECUTABLE, else
# python3 of the PATH).
# Sets MusterTorch_FOUND, MusterTorch_VERSION, MusterTorch_ROOT_DIR and MusterTorch_HAS_CUDA.

set(_hints "${MusterTorch_ROOT}")
if(Torch_DIR)
  list(APPEND _hints "${Torch_DIR}/../../..")
endif()
list(APPEND _hints "${CMAKE_CURRENT_LIST_DIR}/../../../../torch" ${CMAKE_PREFIX_PATH})

function(_muster_torch_of_python result)
  if(Python_EXECUTABLE)
    set(python "${Python_EXECUTABLE}")
  else()
    find_program(python NAMES python3 python NO_CACHE)
  endif()
  if(python)
    execute_process(
      COMMAND "${python}" -c "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
      OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
  set(${result} "${folder}" PARENT_SCOPE)
endfunction()

set(_header include/torch/headeronly/version.h)
find_path(MusterTorch_ROOT_DIR NAMES ${_header} HINTS ${_hints} NO_DEFAULT_PATH NO_CACHE)
if(NOT MusterTorch_ROOT_DIR)
  _muster_torch_of_python(_folder)
  find_path(MusterTorch_ROOT_DIR NAMES ${_header} HINTS "${_folder}" NO_DEFAULT_PATH NO_CACHE)
endif()

if(MusterTorch_ROOT_DIR)
  set(_parts)
  foreach(_part MAJOR MINOR PATCH)
    file(STRINGS "${MusterTorch_ROOT_DIR}/${_header}" _line REGEX "define TORCH_VERSION_${_part} ")
    string(REGEX MATCH "[0-9]+" _number "${_line}")
    list(APPEND _parts ${_number})
  endforeach()
  list(JOIN _parts "." MusterTorch_VERSION)
endif()

set(MusterTorch_HAS_CUDA OFF)
if(EXISTS "${MusterTorch_ROOT_DIR}/lib/libc10_cuda.so")
  set(MusterTorch_HAS_CUDA ON)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(MusterTorch REQUIRED_VARS MusterTorch_ROOT_DIR VERSION_VAR MusterTorch_VERSION
  REASON_FAILURE_MESSAGE "Install torch in the Python that CMake uses (-DPython_EXECUTABLE=...), or pass -DMusterTorch_ROOT=<libtorch folder>.")

function(_muster_import_torch target library)
  add_library(muster::${target} SHARED IMPORTED)
  set_target_properties(muster::${target} PROPERTIES
    IMPORTED_LOCATION "${MusterTorch_ROOT_DIR}/lib/lib${library}.so"
    INTERFACE_LINK_LIBRARIES "${ARGN}")
endfunction()

if(MusterTorch_FOUND AND NOT TARGET muster::torch)
  _muster_import_torch(torch_c10 c10)
  _muster_import_torch(torch_cpu torch_cpu muster::torch_c10)
  _muster_import_torch(torch torch muster::torch_cpu)
  # A program's own RUNPATH finds torch for libmuster.so too, if the program needs torch itself: keep it where a linker
  # would drop libraries that only libmuster.so uses.
  set_target_properties(muster::torch PROPERTIES
    INTERFACE_LINK_OPTIONS "LINKER:--no-as-needed"
    INTERFACE_INCLUDE_DIRECTORIES "${MusterTorch_ROOT_DIR}/include;${MusterTorch_ROOT_DIR}/include/torch/csrc/api/include"
    INTERFACE_COMPILE_DEFINITIONS "_GLIBCXX_USE_CXX11_ABI=1"
    INTERFACE_COMPILE_FEATURES cxx_std_20)
  if(EXISTS "${MusterTorch_ROOT_DIR}/lib/libtorch_python.so")
    _muster_import_torch(torch_python torch_python muster::torch)
  endif()
  if(MusterTorch_HAS_CUDA)
    _muster_import_torch(torch_c10_cuda c10_cuda muster::torch)
  endif()
endif()
