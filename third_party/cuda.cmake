# Finds nvcc, before CMake does: the one that CMAKE_CUDA_COMPILER or CUDACXX names, the site's own on PATH, or that of
# PyPI's wheels (nvidia-cuda-nvcc and what it needs), in the Python that builds.
macro(zc_find_nvcc)
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    find_program(ZC_NVCC nvcc HINTS /usr/local/cuda/bin)
    if(NOT ZC_NVCC)
      find_package(Python 3.10 COMPONENTS Interpreter)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c "import glob, sysconfig; print(*sorted(glob.glob(sysconfig.get_path('purelib') + '/nvidia/*/bin/nvcc'))[-1:])"
        OUTPUT_VARIABLE nvcc OUTPUT_STRIP_TRAILING_WHITESPACE)
      if(nvcc)
        set(ZC_NVCC ${nvcc} CACHE FILEPATH "The CUDA compiler" FORCE)
      else()
        message(FATAL_ERROR "nvcc was not found, which ZC_CUDA=ON needs. Install a CUDA toolkit 12 or newer, or "
                            "pip install nvidia-cuda-nvcc nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm "
                            "nvidia-cuda-cccl, or name it with CUDACXX, or configure with ZC_CUDA=OFF.")
      endif()
    endif()
    set(CMAKE_CUDA_COMPILER ${ZC_NVCC})
    if(ZC_NVCC MATCHES "^(.*/nvidia/[^/]+)/bin/nvcc$")  # the wheels' libraries lie where nvcc does not look
      string(APPEND CMAKE_CUDA_FLAGS " -L${CMAKE_MATCH_1}/lib")
    endif()
  endif()
  if(NOT CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  set(CMAKE_CUDA_ARCHITECTURES ${ZC_CUDA_ARCHITECTURES})
  set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
  set(CMAKE_CUDA_EXTENSIONS OFF)
  set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
endmacro()
