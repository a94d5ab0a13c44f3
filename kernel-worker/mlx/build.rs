//! Lets the executables of this package find MLX where `deploy/mlx-linux` put it.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=DEP_MLX_LIBRARY_FOLDER");
    // Set by the Cargo configuration in place of mlx-sys's build script; absent without the feature and on macOS.
    if let Ok(folder) = std::env::var("DEP_MLX_LIBRARY_FOLDER") {
        println!("cargo::rustc-link-arg=-Wl,-rpath,{folder}");
        // The CUDA flavour needs libraries that only a machine with the GPU has.
        println!("cargo::rustc-link-arg=-Wl,--allow-shlib-undefined");
    }
}
