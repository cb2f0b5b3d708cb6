//! Macro that implements the calls of [`Driver`](super::Driver) that differ between vendors in the
//! name of the driver's function alone.

/// Implements the calls of [`Driver`](super::Driver) that differ only in a name, for a type that
/// has a method `api`, which returns the table of the driver's functions. The module that invokes
/// the macro must have the functions `check` and `check_for`. Each entry has the driver's function
/// for a call, and that function's name in errors.
macro_rules! common_calls {
    (
        exchange_capture_mode($relaxed:expr): $exchange_mode:ident as $exchange_mode_name:literal,
        memory_info: $memory_info:ident as $memory_info_name:literal,
        destroy_stream: $destroy_stream:ident as $destroy_stream_name:literal,
        capture_of: $capture_of:ident as $capture_of_name:literal,
        sync_stream: $sync_stream:ident as $sync_stream_name:literal,
        destroy_event: $destroy_event:ident as $destroy_event_name:literal,
        record: $record:ident as $record_name:literal,
        wait_for: $wait_for:ident as $wait_for_name:literal,
        sync_event: $sync_event:ident as $sync_event_name:literal,
        pinned_address: $pinned_address:ident as $pinned_address_name:literal,
        resources: $resources:ident as $resources_name:literal,
        resident: $resident:ident as $resident_name:literal,
    ) => {
        fn exchange_capture_mode(&self, mode: Option<u32>) -> Result<u32> {
            let mut mode = mode.unwrap_or($relaxed);
            // SAFETY: `mode` holds the new mode and receives the old one.
            let code = unsafe { (self.api().$exchange_mode)(&mut mode) };
            check($exchange_mode_name, code)?;
            Ok(mode)
        }

        fn memory_info(&self) -> Result<(u64, u64)> {
            let _bound = self.bind_relaxed()?;
            let (mut free, mut total) = (0, 0);
            // SAFETY: `free` and `total` receive the answers.
            let code = unsafe { (self.api().$memory_info)(&mut free, &mut total) };
            check($memory_info_name, code)?;
            Ok((free as u64, total as u64))
        }

        unsafe fn destroy_stream(&self, stream: RawStream) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the caller guarantees that the stream is alive and not used afterwards.
            check($destroy_stream_name, unsafe { (self.api().$destroy_stream)(stream) })
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
            check($capture_of_name, code)?;
            Ok((status != api::CAPTURE_NONE).then_some(id))
        }

        unsafe fn sync_stream(&self, stream: RawStream) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the stream is alive, by the contract of this function.
            check($sync_stream_name, unsafe { (self.api().$sync_stream)(stream) })
        }

        unsafe fn destroy_event(&self, event: RawEvent) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the caller guarantees that the event is alive and not used afterwards.
            check($destroy_event_name, unsafe { (self.api().$destroy_event)(event) })
        }

        unsafe fn record(&self, event: RawEvent, stream: RawStream) -> Result<()> {
            let _bound = self.bind()?;
            // SAFETY: event and stream are alive, by the contract of this function.
            check($record_name, unsafe { (self.api().$record)(event, stream) })
        }

        unsafe fn wait_for(&self, event: RawEvent, stream: RawStream) -> Result<()> {
            let _bound = self.bind()?;
            // SAFETY: event and stream are alive, by the contract of this function.
            check($wait_for_name, unsafe { (self.api().$wait_for)(stream, event, 0) })
        }

        unsafe fn sync_event(&self, event: RawEvent) -> Result<()> {
            let _bound = self.bind_relaxed()?;
            // SAFETY: the event is alive, by the contract of this function.
            check($sync_event_name, unsafe { (self.api().$sync_event)(event) })
        }

        unsafe fn pinned_address(&self, host: NonNull<u8>) -> Result<u64> {
            let _bound = self.bind_relaxed()?;
            let mut address = 0;
            let host = host.as_ptr().cast::<c_void>();
            // SAFETY: `address` receives the answer; the caller guarantees that `pin` returned the
            // memory.
            let code = unsafe { (self.api().$pinned_address)(&mut address, host, 0) };
            check($pinned_address_name, code)?;
            Ok(address)
        }

        unsafe fn resources(&self, function: RawFunction) -> Result<(u32, u32)> {
            let _bound = self.bind_relaxed()?;
            let attribute = |attribute| {
                let mut value = 0;
                // SAFETY: `value` receives the answer; the function is alive.
                let code = unsafe { (self.api().$resources)(&mut value, attribute, function) };
                check($resources_name, code).map(|()| value as u32)
            };
            Ok((attribute(api::REGISTERS)?, attribute(api::LOCAL_BYTES)?))
        }

        unsafe fn resident(&self, function: RawFunction, threads: u32, shared: u32) -> Result<u32> {
            let _bound = self.bind_relaxed()?;
            let (mut each, threads, shared) = (0, threads as i32, shared as usize);
            // SAFETY: `each` receives the answer; the function is alive.
            let code = unsafe { (self.api().$resident)(&mut each, function, threads, shared) };
            check($resident_name, code)?;
            Ok(each as u32)
        }
    };
}
pub(in crate::backend) use common_calls;
