//! Memory that the allocator keeps.

/// Gives free memory of the heap back to the kernel, also from its middle. Walks the whole heap: for quiet moments.
pub fn give_back() {
    // SAFETY: takes no pointer; the allocator locks itself.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Lets the allocator keep up to `bytes` of free memory, in one heap for all threads, instead of handing each large piece
/// back to the kernel at once: memory from the kernel is cleared and mapped page by page. For the start of a program.
pub fn keep(bytes: u32) {
    #[cfg(target_env = "gnu")]
    {
        let bytes = libc::c_int::try_from(bytes).unwrap_or(libc::c_int::MAX);
        let settings =
            [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, bytes), (libc::M_TRIM_THRESHOLD, bytes)];
        for (setting, value) in settings {
            // SAFETY: takes no pointer; the allocator locks itself.
            unsafe { libc::mallopt(setting, value) };
        }
    }
}
