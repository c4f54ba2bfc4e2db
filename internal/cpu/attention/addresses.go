package attention

import (
	"unsafe"

	"gorgonia.org/leanattention/internal/attn"
)

// addresses returns the addresses of keys and values of one KV head of a sequence.
type addresses struct {
	plan         *Plan
	seq          *span
	k, v         unsafe.Pointer   // page 0, slot 0 of the head
	keyAt, valAt attn.PageStrides // in bytes
	size         int              // bytes of an element
	runs         *runs            // memory of the tile's K and V
	decoder      rowDecoder       // nil: rows are read in place
}

// addresses returns the addresses for a block.
func (ws *workspace[F]) addresses(w *worker[F], b block) addresses {
	f := &ws.plan.g.Pages
	a := addresses{plan: ws.plan, seq: b.seq, size: storedType[F](&ws.plan.g).Size(), runs: &w.runs}
	inBytes := func(s attn.PageStrides) attn.PageStrides {
		return attn.PageStrides{Page: s.Page * a.size, Head: s.Head * a.size, Row: s.Row * a.size}
	}
	if !readInPlace[F](&ws.plan.g) {
		d := &w.decoded
		d.plan, d.pages, d.head, a.decoder = ws.plan, &ws.ops.Pages, b.head, d
		key, value := d.strides()
		a.keyAt, a.valAt = inBytes(attn.PageStrides{Row: key}), inBytes(attn.PageStrides{Row: value})
		return a
	}
	a.keyAt, a.valAt = inBytes(f.Key().At), inBytes(f.ValuePlane().At)
	a.k = unsafe.Add(ws.ops.Pages[0].Data.Ptr, b.head*a.keyAt.Head)
	a.v = unsafe.Add(ws.ops.Pages[f.Value.Plane].Data.Ptr, b.head*a.valAt.Head)
	return a
}

// slot returns the page and the slot of a key.
func (a *addresses) slot(key int) (page, slot int) {
	tokens := a.plan.g.PageTokens
	return int(a.plan.pages[a.seq.page+key/tokens]), key % tokens
}

// row returns the addresses of a key and its value.
func (a *addresses) row(key int) (k, v unsafe.Pointer) {
	page, slot := a.slot(key)
	return unsafe.Add(a.k, page*a.keyAt.Page+slot*a.keyAt.Row), unsafe.Add(a.v, page*a.valAt.Page+slot*a.valAt.Row)
}

// streams sets t to keys from key on, before end, in four streams that are as far apart as possible. It returns the
// number of keys. If the number exceeds limit, they are one run.
func (a *addresses) streams(t *tile, key, end, limit int) int {
	if a.decoder != nil {
		return a.neighbours(t, key, min(end, key+limit))
	}
	g := &a.plan.g
	t.KStep, t.VStep = a.keyAt.Row, a.valAt.Row
	slot := key % g.PageTokens
	if four := 4 * g.PageTokens; slot == 0 && end-key >= four { // runs of four whole pages
		runs := min((end-key)/four, max(limit/four, 1))
		a.open(t, runs, four)
		t.order = order{streams: g.PageTokens > 1, skip: 3 * g.PageTokens} // four pages of one key each are in order
		for i := range t.order.first {
			t.order.first[i] = i * g.PageTokens
		}
		for r := range runs {
			for i := range t.K[r] {
				t.K[r][i], t.V[r][i] = a.row(key + r*four + i*g.PageTokens)
			}
		}
		return runs * four
	}
	// Quarters of the rest of a page. The first quarters may be longer by a row.
	n := min(end-key, g.PageTokens-slot)
	a.open(t, 1, (n+3)/4*4)
	k, v := a.row(key)
	first := 0
	t.order = order{streams: true}
	for i := range t.K[0] {
		if i >= n {
			first = 0 // no key: unused, but the pointer must be valid
		}
		t.order.first[i] = first
		t.K[0][i], t.V[0][i] = unsafe.Add(k, first*t.KStep), unsafe.Add(v, first*t.VStep)
		first += (n - i + 3) / 4
	}
	return n
}

// open gives t `runs` runs of n keys.
func (a *addresses) open(t *tile, runs, n int) {
	t.K, t.V, t.Run = a.runs.k[:runs], a.runs.v[:runs], n
}

// walk sets t to at most limit of the n keys of streams, from key number from on. It is called for 0, limit, 2*limit
// and so on in order.
func (a *addresses) walk(t *tile, from, n, limit int) {
	t.Count, t.Next = min(n-from, limit), nil
	if n <= limit {
		return
	}
	r := a.runs
	if from == 0 {
		r.firstK, r.firstV = t.K[0], t.V[0]
	}
	left, row := n-from, from/4
	for i := range r.next {
		t.K[0][i], t.V[0][i] = r.firstK.along(i, left, row*t.KStep), r.firstV.along(i, left, row*t.VStep)
	}
	if left -= limit; left > 0 {
		for i := range r.next {
			r.next[i] = r.firstK.along(i, left, (row+limit/4)*t.KStep)
		}
		t.Next = &r.next
	}
}

// along returns the position of stream i after `bytes` bytes, with left keys in all. If stream i has no keys left, it
// returns that of stream 0, since the memory of stream i may have ended.
func (s *Streams) along(i, left, bytes int) unsafe.Pointer {
	if i >= left {
		i = 0
	}
	return unsafe.Add(s[i], bytes)
}

// runs has the runs of a worker's calls.
type runs struct {
	k, v           []Streams
	firstK, firstV Streams // at the beginning of walk
	next           Streams
}

// forget clears pointers into operands.
func (r *runs) forget() {
	clear(r.k)
	clear(r.v)
	r.firstK, r.firstV, r.next = Streams{}, Streams{}, Streams{}
}

// neighbours sets t to keys from key on, before end, in order. It returns the number of keys.
func (a *addresses) neighbours(t *tile, key, end int) int {
	t.order = order{}
	if a.decoder != nil {
		n, tokens := min(end-key, decodedKeys), a.plan.g.PageTokens
		for i := 0; i < n; {
			page, slot := a.slot(key + i)
			rows := min(n-i, tokens-slot)
			a.decoder.decode(i, rows, page, slot)
			i += rows
		}
		a.openDecoded(t, n)
		return n
	}
	g := &a.plan.g
	t.Count = min(end-key, g.PageTokens-key%g.PageTokens)
	k, v := a.row(key)
	a.openRows(t, k, v)
	return t.Count
}

// openDecoded sets t to the first n decoded rows, in order.
func (a *addresses) openDecoded(t *tile, n int) {
	t.Count = n
	k, v := a.decoder.row(0)
	a.openRows(t, k, v)
}

// openRows sets t to Count consecutive rows.
func (a *addresses) openRows(t *tile, k, v unsafe.Pointer) {
	a.open(t, 1, (t.Count+3)/4*4)
	kRow, vRow := a.keyAt.Row, a.valAt.Row
	t.KStep, t.VStep = 4*kRow, 4*vRow
	for i := range t.K[0] {
		row := min(i, t.Count-1)
		t.K[0][i], t.V[0][i] = unsafe.Add(k, row*kRow), unsafe.Add(v, row*vRow)
	}
}
