package lean

// Keys are the keys [First, End) that an output tile's rows see, any of them. Of LeanTiles of a size the first one
// begins with the first key, and the last one may be shorter.
type Keys struct{ First, End int }

// Len returns how many keys there are; none if End is not behind First.
func (k Keys) Len() int { return max(k.End-k.First, 0) }

// Tiles returns the number of LeanTiles.
func (k Keys) Tiles(size int) int64 {
	if k.Len() == 0 {
		return 0
	}
	return int64((k.Len()-1)/size) + 1
}

// Part returns the keys of LeanTiles [begin, end): a [Work]'s, say.
func (k Keys) Part(begin, end int64, size int) Keys {
	n := k.Len()
	at := func(tile int64) int {
		if tile >= k.Tiles(size) { // the product may be no int
			return n
		}
		return int(tile) * size
	}
	return Keys{k.First + at(begin), k.First + at(end)}
}
