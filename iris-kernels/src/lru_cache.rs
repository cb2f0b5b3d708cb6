//! Bounded cache with least-recently-used eviction.

/// Cache of values by key; [`LruCache::new`] sets the capacity.
#[derive(Debug)]
pub(crate) struct LruCache<K, V> {
    most: usize,
    /// Entries ordered by last use, the most recent last.
    entries: Vec<(K, V)>,
}

impl<K: PartialEq, V> LruCache<K, V> {
    /// Makes an empty cache for up to `most` values, at least one.
    pub(crate) fn new(most: usize) -> LruCache<K, V> {
        LruCache { most: most.max(1), entries: Vec::new() }
    }

    /// Returns the value of `key`; if the cache has none, makes and stores it first. The lookup of
    /// an existing value allocates nothing.
    ///
    /// # Errors
    /// Errors of `make`; nothing is stored for `key` then.
    pub(crate) fn get_or_make<E>(
        &mut self,
        key: K,
        make: impl FnOnce() -> Result<V, E>,
    ) -> Result<&mut V, E> {
        // Search from the most recently used entry on, because programs repeat their calls.
        match self.entries.iter().rposition(|(known, _)| *known == key) {
            Some(at) => self.entries[at..].rotate_left(1),
            None => {
                if self.entries.len() == self.most {
                    self.entries.remove(0);
                }
                self.entries.push((key, make()?));
            }
        }
        let last = self.entries.len() - 1;
        Ok(&mut self.entries[last].1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_entry_that_was_used_longest_ago_makes_room() {
        let mut recent = LruCache::new(3);
        let mut made = Vec::new();
        for key in [1, 2, 3, 1, 4, 1, 3, 2] {
            let value = recent.get_or_make(key, || {
                made.push(key);
                Ok::<_, ()>(10 * key)
            });
            assert_eq!(value, Ok(&mut (10 * key)));
        }
        assert_eq!(made, [1, 2, 3, 4, 2], "4 takes the place of 2, and 2 that of 4");
        let keys: Vec<_> = recent.entries.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys, [1, 3, 2]);
    }

    #[test]
    fn a_value_that_cannot_be_made_is_tried_again() {
        let mut recent = LruCache::new(1);
        assert_eq!(recent.get_or_make("key", || Err("no")), Err("no"));
        *recent.get_or_make("key", || Ok::<_, ()>(1)).unwrap() += 1;
        assert_eq!(recent.get_or_make("key", || Ok::<_, ()>(9)), Ok(&mut 2));
    }
}
