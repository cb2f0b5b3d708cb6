//! Macros that implement calls of [`Driver`](super::Driver) and
//! [`MemoryDriver`](super::MemoryDriver) that differ between vendors only in the name of the
//! driver's function.

/// Implements the calls of [`Driver`](super::Driver) that differ between vendors only in the name
/// of the driver's function. Each entry of the invocation names the driver's function for one call.
/// The type must have the methods `api`, which returns the table of the driver's functions, and
/// `forget_error`; the invoking module must have the functions `check` and `check_for`.
macro_rules! common_calls {
    (
        exchange_capture_mode($relaxed:expr): $exchange_mode:ident,
        memory_info: $memory_info:ident,
        destroy_stream: $destroy_stream:ident,
        capture_of: $capture_of:ident,
        sync_stream: $sync_stream:ident,
        stream_is_done: $query_stream:ident,
        create_event($event_flags:expr): $create_event:ident,
        event_is_done: $query_event:ident,
        destroy_event: $destroy_event:ident,
        record: $record:ident,
        wait_for: $wait_for:ident,
        sync_event: $sync_event:ident,
        pin($host_flags:expr): $pin:ident,
        pinned_address: $pinned_address:ident,
        load($is_image:path, $image:literal): $load:ident,
        resources: $resources:ident,
        resident: $resident:ident,
    ) => {
        fn exchange_capture_mode(&self, mode: Option<u32>) -> Result<u32> {
            let mut mode = mode.unwrap_or($relaxed);
            // SAFETY: `mode` holds the new mode and receives the old one.
            let code = unsafe { (self.api().$exchange_mode)(&mut mode) };
            check(stringify!($exchange_mode), code)?;
            Ok(mode)
        }

        fn memory_info(&self) -> Result<(u64, u64)> {
            let _bound = self.bind_relaxed()?;
            let (mut free, mut total) = (0, 0);
            // SAFETY: `free` and `total` receive the answers.
            let code = unsafe { (self.api().$memory_info)(&mut free, &mut total) };
            check(stringify!($memory_info), code)?;
            Ok((free as u64, total as u64))
        }

        unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the caller guarantees that the stream is alive and not used afterwards.
            check(stringify!($destroy_stream), unsafe { (self.api().$destroy_stream)(stream) })
        }

        unsafe fn capture_of(&self, stream: RawStream) -> Result<Option<u64>> {
            let _bound = self.bind()?;
            let (mut status, mut id) = (api::CAPTURE_NONE, 0);
            // SAFETY: the caller guarantees that the stream is alive; `status` and `id` receive the
            // answers; the other pointers may be null.
            let code = unsafe {
                let call = self.api().$capture_of;
                call(stream, &mut status, &mut id, null_mut(), null_mut(), null_mut())
            };
            check(stringify!($capture_of), code)?;
            Ok((status != api::CAPTURE_NONE).then_some(id))
        }

        unsafe fn sync_stream(&self, stream: RawStream) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the stream is alive, by the contract of this function.
            check(stringify!($sync_stream), unsafe { (self.api().$sync_stream)(stream) })
        }

        unsafe fn stream_is_done(&self, stream: RawStream) -> bool {
            let Ok(_bound) = self.bind_relaxed() else { return false };
            // SAFETY: the stream is alive, by the contract of this function.
            let ended = api::has_ended(unsafe { (self.api().$query_stream)(stream) });
            if !ended {
                self.forget_error();
            }
            ended
        }

        fn create_event(&self) -> Result<RawEvent> {
            let _bound = self.bind_relaxed()?;
            let mut event = RawEvent::default();
            // SAFETY: `event` receives the answer.
            let code = unsafe { (self.api().$create_event)(&mut event, $event_flags) };
            check(stringify!($create_event), code)?;
            Ok(event)
        }

        unsafe fn event_is_done(&self, event: RawEvent) -> bool {
            let Ok(_bound) = self.bind_relaxed() else { return false };
            // SAFETY: the event is alive, by the contract of this function.
            let ended = api::has_ended(unsafe { (self.api().$query_event)(event) });
            if !ended {
                self.forget_error();
            }
            ended
        }

        unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the caller guarantees that the event is alive and not used afterwards.
            check(stringify!($destroy_event), unsafe { (self.api().$destroy_event)(event) })
        }

        unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
            let _bound = self.bind()?;
            // SAFETY: event and stream are alive, by the contract of this function.
            check(stringify!($record), unsafe { (self.api().$record)(event, stream) })
        }

        unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()> {
            let _bound = self.bind()?;
            // SAFETY: event and stream are alive, by the contract of this function.
            check(stringify!($wait_for), unsafe { (self.api().$wait_for)(stream, event, 0) })
        }

        unsafe fn sync_event(&self, event: RawEvent) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the event is alive, by the contract of this function.
            check(stringify!($sync_event), unsafe { (self.api().$sync_event)(event) })
        }

        fn pin(&self, bytes: usize) -> Result<NonNull<u8>> {
            let _bound = self.bind_relaxed()?;
            let mut memory = null_mut();
            // SAFETY: `memory` receives the answer.
            let code = unsafe { (self.api().$pin)(&mut memory, bytes, $host_flags) };
            check(stringify!($pin), code)?;
            NonNull::new(memory.cast::<u8>())
                .ok_or_else(|| Error::invalid("address of pinned memory", "null", "a page's"))
        }

        unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64> {
            let _bound = self.bind_relaxed()?;
            let mut address = 0;
            let host = host.as_ptr().cast::<c_void>();
            // SAFETY: `address` receives the answer; the caller guarantees that `pin` returned the
            // memory.
            let code = unsafe { (self.api().$pinned_address)(&mut address, host, 0) };
            check(stringify!($pinned_address), code)?;
            Ok(address)
        }

        fn load(&self, image: &[u8]) -> Result<RawModule> {
            if !$is_image(image) {
                return Err(Error::invalid("image of a module", "something else", $image));
            }
            let _bound = self.bind_relaxed()?;
            let mut module = RawModule::default();
            let image = image.as_ptr().cast::<c_void>();
            // SAFETY: `module` receives the answer; the driver finds the end of the image itself,
            // for each kind of image that was let through above.
            let code = unsafe { (self.api().$load)(&mut module, image) };
            check(stringify!($load), code)?;
            Ok(module)
        }

        unsafe fn resources(&self, function: RawFunction) -> Result<(u32, u32)> {
            let _bound = self.bind_relaxed()?;
            let attribute = |attribute| {
                let mut value = 0;
                // SAFETY: `value` receives the answer; the function is alive.
                let code = unsafe { (self.api().$resources)(&mut value, attribute, function) };
                check(stringify!($resources), code).map(|()| value as u32)
            };
            Ok((attribute(api::REGISTERS)?, attribute(api::LOCAL_BYTES)?))
        }

        unsafe fn resident(&self, function: RawFunction, threads: u32, shared: u32) -> Result<u32> {
            let _bound = self.bind_relaxed()?;
            let (mut each, threads, shared) = (0, threads as i32, shared as usize);
            // SAFETY: `each` receives the answer; the function is alive.
            let code = unsafe { (self.api().$resident)(&mut each, function, threads, shared) };
            check(stringify!($resident), code)?;
            Ok(each as u32)
        }
    };
}
pub(in crate::backend) use common_calls;

/// Implements the calls of [`MemoryDriver`](super::MemoryDriver) for plain memory, which also
/// differ between vendors only in the name of the driver's function. `of_a_device` returns the
/// driver's constant for the memory type of device memory. The type `Handle` of the module `api` is
/// the driver's IPC handle.
macro_rules! memory_calls {
    (
        open($vendor:literal, $open_flags:expr): $open:ident,
        close: $close:ident,
        free: $free:ident,
        handle_of: $handle_of:ident,
        check_foreign($of_a_device:expr): $attribute:ident, $range:ident,
    ) => {
        fn open(&self, handle: &[u8]) -> Result<u64> {
            let Ok(handle) = <[u8; 64]>::try_from(handle) else {
                let expected = concat!("64 bytes, as ", $vendor, "'s are");
                return Err(Error::invalid("handle of memory", format!("{handle:?}"), expected));
            };
            let _bound = self.bind_relaxed()?;
            let (handle, flags) = (api::Handle(handle), $open_flags(self));
            let mut address = 0;
            // SAFETY: `address` receives the answer; the driver of the peer that owns the memory
            // made `handle`.
            let code = unsafe { (self.api().$open)(&mut address, handle, flags) };
            check(stringify!($open), code)?;
            Ok(address)
        }

        unsafe fn close(&self, address: u64) -> Result<()> {
            // SAFETY: `open` opened the address, and no user is left, by the contract of this
            // function.
            check(stringify!($close), unsafe { (self.api().$close)(address) })
        }

        unsafe fn free(&self, address: u64) -> Result<()> {
            // SAFETY: this process allocated the memory, and no user is left, by the contract of
            // this function.
            check(stringify!($free), unsafe { (self.api().$free)(address) })
        }

        fn handle_of(&self, address: u64) -> Result<Vec<u8>> {
            let _bound = self.bind_relaxed()?;
            let mut handle = api::Handle([0; 64]);
            // SAFETY: `handle` receives the answer; the memory is plain memory that this process
            // allocated.
            let code = unsafe { (self.api().$handle_of)(&mut handle, address) };
            check(stringify!($handle_of), code)?;
            Ok(handle.0.to_vec())
        }

        fn check_foreign(&self, address: u64, bytes: u64) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            let attribute = |attribute| {
                let mut value = 0_i32;
                let to = (&raw mut value).cast::<c_void>();
                // SAFETY: the values of all attributes that are queried below are 4-byte integers.
                let code = unsafe { (self.api().$attribute)(to, attribute, address) };
                (code == api::SUCCESS).then_some(value)
            };
            let of_a_device = attribute(api::MEMORY_TYPE) == Some($of_a_device(self) as i32);
            if !of_a_device {
                self.forget_error();
            }
            let range = || {
                let (mut base, mut size) = (0, 0);
                // SAFETY: `base` and `size` receive the answers.
                let code = unsafe { (self.api().$range)(&mut base, &mut size, address) };
                check(stringify!($range), code)?;
                Ok((base, size as u64))
            };
            let owner = || attribute(api::MEMORY_DEVICE);
            check_foreign((address, bytes), self.ordinal, of_a_device, owner, range)
        }
    };
}
pub(in crate::backend) use memory_calls;
