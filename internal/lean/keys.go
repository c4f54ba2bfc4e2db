package lean

// Keys is the range of keys [First, End) that at least one row of an output tile attends to. The first LeanTile begins
// with the first key. The last LeanTile may be shorter than the others.
type Keys struct{ First, End int }

// Len returns the number of keys, 0 if End <= First.
func (k Keys) Len() int { return max(k.End-k.First, 0) }

// Tiles returns the number of LeanTiles.
func (k Keys) Tiles(size int) int64 {
	if k.Len() == 0 {
		return 0
	}
	return int64((k.Len()-1)/size) + 1
}

// Part returns the keys of LeanTiles [begin, end).
func (k Keys) Part(begin, end int64, size int) Keys {
	n := k.Len()
	at := func(tile int64) int {
		if tile >= k.Tiles(size) { // the product may overflow an int
			return n
		}
		return int(tile) * size
	}
	return Keys{k.First + at(begin), k.First + at(end)}
}
