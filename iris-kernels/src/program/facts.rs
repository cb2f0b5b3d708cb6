//! Choice of the alternative (list of steps) of a program that a call uses, from facts about the
//! call.

use super::{Alternative, Gemm, Program, When};

/// Number of columns of C from which multiplying a row of A takes longer than receiving it from one
/// peer. On an H200 the break-even is 1950 columns, from 7.5e14 flop/s and 3.85e11 B/s for two-byte
/// elements.
const COLUMNS: u32 = 2048;

/// Facts about a call that decide which alternative of its program it uses. A plan implements this
/// trait for the calls that it expects, the executor for the call that it enqueues.
pub trait Facts {
    /// Error if the driver fails to answer a query.
    type Error;

    /// Number of ranks.
    fn ranks(&self) -> u32;

    /// Number of columns of C.
    fn columns(&self) -> u32;

    /// Whether A is split by columns.
    fn is_by_columns(&self) -> bool;

    /// Maximum number of parts in which the rows of one rank are sent.
    fn parts(&self) -> u32;

    /// Whether copy engines do the transfers.
    ///
    /// # Errors
    /// Errors of the driver.
    fn has_engines(&self) -> Result<bool, Self::Error>;

    /// Whether the special GEMM implementation that `gemm` requires (a core other than
    /// [`super::Core::Any`]) can do this product.
    fn fits(&self, gemm: &Gemm) -> bool;
}

impl Program {
    /// Whether any alternative of the program has the condition `when`.
    pub fn asks(&self, when: When) -> bool {
        self.alternatives.iter().any(|it| it.when.contains(&when))
    }

    /// First alternative among `of` whose conditions a call meets; `None` if there is none.
    ///
    /// # Errors
    /// Errors of [`Facts::has_engines`].
    pub fn first_met<F: Facts>(
        &self,
        of: impl IntoIterator<Item = &'static Alternative>,
        call: &F,
    ) -> Result<Option<&'static Alternative>, F::Error> {
        for alternative in of {
            if self.takes(alternative) && self.is_met(alternative, call)? {
                return Ok(Some(alternative));
            }
        }
        Ok(None)
    }

    /// Whether a call meets all conditions of an alternative.
    fn is_met<F: Facts>(&self, of: &Alternative, call: &F) -> Result<bool, F::Error> {
        let fits = || self.special_gemm(of).is_some_and(|gemm| call.fits(&gemm));
        for when in of.when {
            let is_met = match when {
                When::ByColumns => call.is_by_columns(),
                When::Wide => call.columns() >= COLUMNS * (call.ranks() - 1),
                When::Engines => call.has_engines()?,
                When::Exchanges => fits(),
                // A GEMM that waits for copies, or that stores to peers, needs the same conditions
                // as copy engines: no other rank shares the device, and the call is neither traced
                // nor counted.
                When::Gated | When::Stores => fits() && call.has_engines()?,
                // If the message has a single part, a separate kernel adds the peer's rows. A GEMM
                // that adds them would have to wait for the peer's part before it multiplies, which
                // takes longer. With 1024 rows in one part, a call took 106 us with a separate sum
                // and 130 us without; with 8192 rows in four parts, 806 us with separate sums and
                // 791 us without (all_reduce, 2 x H200, 2026-11-22).
                When::Adds => call.ranks() == 2 && call.parts() > 1 && fits(),
            };
            if !is_met {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
