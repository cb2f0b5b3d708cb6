/// Number of a call of an op: an `i32` that wraps.
///
/// Call numbers are compared only by their wrapping difference. `==` would miss a peer that is one
/// call ahead, and `<` fails when the number wraps at 2^31 - 1. So the only operations are
/// [`Call::next`], [`Call::previous`] and [`Call::reached_by`].
///
/// ```
/// use iris_sync::Call;
/// let last = Call::new(i32::MAX);
/// assert!(last.reached_by(last.next().number()));
/// assert!(!last.next().reached_by(last.number()));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub struct Call(i32);

/// Number of calls from one refresh to the next. In every call whose number is a multiple of this
/// period, each rank stores the number into all words that it writes at peers. Without the refresh,
/// a word that many calls leave unused could become 2^31 calls old; the wrapping difference between
/// its value and the current call's number would then change sign.
pub const REFRESH_PERIOD: i32 = 1 << 29;

impl Call {
    /// Makes a call from its number, which wraps around after `i32::MAX`.
    pub const fn new(number: i32) -> Self {
        Self(number)
    }

    /// Number of the call, as words in memory hold it.
    pub const fn number(self) -> i32 {
        self.0
    }

    /// The call after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// The call before this one. Words of an op that has not run yet are initialised to the number
    /// before the op's first call.
    #[must_use]
    pub const fn previous(self) -> Self {
        Self(self.0.wrapping_sub(1))
    }

    /// Whether a word that holds the call number `seen` was set by this call or a later one;
    /// correct also if call numbers wrap around.
    pub const fn reached_by(self, seen: i32) -> bool {
        seen.wrapping_sub(self.0) >= 0
    }

    /// Half of the inbox (memory of a rank that its peers write), 0 or 1, that this call uses.
    /// Consecutive calls alternate between the halves.
    pub const fn parity(self) -> u32 {
        (self.0 & 1) as u32
    }

    /// Call two before this one, the last earlier call that used the same half of the inbox (memory
    /// of a rank that its peers write).
    #[must_use]
    pub const fn of_same_slot_before(self) -> Self {
        Self(self.0.wrapping_sub(2))
    }

    /// Whether this call refreshes those LL words (data with a call number as flag) that it does
    /// not need for data, so that no flag becomes too old. True for one even and one odd call
    /// number in every [`REFRESH_PERIOD`] calls.
    pub const fn refreshes_slot(self) -> bool {
        self.0 & (REFRESH_PERIOD - 1) <= 1
    }

    /// Whether writers store the number of this call into all of their words, used or not; see
    /// [`REFRESH_PERIOD`].
    pub const fn refreshes(self) -> bool {
        self.0 & (REFRESH_PERIOD - 1) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_by_wrapping_difference() {
        for start in [i32::MIN, -2, -1, 0, 1, (1 << 29) - 1, i32::MAX - 1, i32::MAX] {
            let call = Call::new(start);
            assert!(call.reached_by(start));
            assert!(call.reached_by(call.next().number()), "a peer one call ahead");
            assert!(call.next().reached_by(call.next().next().number()));
            assert!(!call.reached_by(call.previous().number()));
            assert_ne!(call.parity(), call.next().parity());
        }
    }

    #[test]
    fn each_slot_is_refreshed_once_a_period() {
        for multiple in -4..4 {
            let first = Call::new(REFRESH_PERIOD.wrapping_mul(multiple));
            let refreshing = [first.previous(), first, first.next(), first.next().next()];
            assert_eq!(refreshing.map(Call::refreshes_slot), [false, true, true, false]);
            assert_ne!(first.parity(), first.next().parity());
            assert_eq!(first.of_same_slot_before(), first.previous().previous());
        }
    }

    #[test]
    fn refreshes_before_half_the_range_has_passed() {
        let refreshes: Vec<_> = [i32::MIN, -(1 << 30), -(1 << 29), 0, 1 << 29, 1 << 30]
            .into_iter()
            .map(|number| Call::new(number).refreshes())
            .collect();
        assert_eq!(refreshes, [true; 6]);
        assert!(!Call::new(1).refreshes() && !Call::new(i32::MAX).refreshes());
        // The oldest value that a word can hold is one refresh period and one call old.
        assert!(Call::new(REFRESH_PERIOD + 1).reached_by(2 * REFRESH_PERIOD));
    }
}
