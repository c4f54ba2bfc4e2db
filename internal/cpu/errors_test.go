package cpu

import (
	"errors"
	"math"
	"testing"
	"unsafe"

	"gorgonia.org/leanattention/internal/lean"
)

// good is a small plan's input, and operands that fit it exactly.
func good() (Geometry, []Sequence, Operands[float32]) {
	g := Geometry{
		Heads: 4, KVHeads: 2, Dim: 3, ValueDim: 2,
		Query: Strides{12, 3}, Out: Strides{8, 2}, LSE: Strides{4, 1},
		Key: PageStrides{2 * 4 * 3, 4 * 3, 3}, Value: PageStrides{2 * 4 * 2, 4 * 2, 2}, PageTokens: 4,
		Scale: 1, Causal: true, TileTokens: 4, Workers: 2,
	}
	seqs := []Sequence{
		{Row: 0, Queries: 1, Keys: 9, Pages: []int32{2, 0, 1}},
		{Row: 1, Queries: 2, Keys: 4, Pages: []int32{3}},
	}
	k, v := make([]float32, 4*g.Key.Page), make([]float32, 4*g.Value.Page)
	return g, seqs, Operands[float32]{
		Q: make([]float32, 3*12), Out: make([]float32, 3*8), LSE: make([]float32, 3*4),
		K: Buffer{Float32, unsafe.Pointer(&k[0]), len(k)},
		V: Buffer{Float32, unsafe.Pointer(&v[0]), len(v)},
	}
}

func TestBuildErrors(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Geometry, []Sequence)
		want   error
	}{
		"as it should be":                {func(g *Geometry, s []Sequence) {}, nil},
		"no heads":                       {func(g *Geometry, s []Sequence) { g.Heads = 0 }, ErrShape},
		"no KV heads":                    {func(g *Geometry, s []Sequence) { g.KVHeads = 0 }, ErrShape},
		"heads not a multiple":           {func(g *Geometry, s []Sequence) { g.KVHeads = 3 }, ErrShape},
		"fewer heads than KV heads":      {func(g *Geometry, s []Sequence) { g.KVHeads = 8 }, ErrShape},
		"no dim":                         {func(g *Geometry, s []Sequence) { g.Dim = 0 }, ErrShape},
		"negative value dim":             {func(g *Geometry, s []Sequence) { g.ValueDim = -1 }, ErrShape},
		"no page size":                   {func(g *Geometry, s []Sequence) { g.PageTokens = 0 }, ErrShape},
		"negative LeanTile":              {func(g *Geometry, s []Sequence) { g.TileTokens = -1 }, ErrShape},
		"negative workers":               {func(g *Geometry, s []Sequence) { g.Workers = -1 }, ErrShape},
		"scale not a number":             {func(g *Geometry, s []Sequence) { g.Scale = math.NaN() }, ErrShape},
		"infinite scale":                 {func(g *Geometry, s []Sequence) { g.Scale = math.Inf(-1) }, ErrShape},
		"negative window":                {func(g *Geometry, s []Sequence) { g.Window = -1 }, ErrShape},
		"negative soft cap":              {func(g *Geometry, s []Sequence) { g.SoftCap = -1 }, ErrShape},
		"infinite soft cap":              {func(g *Geometry, s []Sequence) { g.SoftCap = math.Inf(1) }, ErrShape},
		"soft cap not a number":          {func(g *Geometry, s []Sequence) { g.SoftCap = math.NaN() }, ErrShape},
		"too few slopes":                 {func(g *Geometry, s []Sequence) { g.Slopes = NewSlopes(make([]float64, 3)) }, ErrShape},
		"slope not a number":             {func(g *Geometry, s []Sequence) { g.Slopes = NewSlopes([]float64{1, 2, 3, math.NaN()}) }, ErrShape},
		"huge window":                    {func(g *Geometry, s []Sequence) { g.Window = math.MaxInt }, nil},
		"unknown schedule":               {func(g *Geometry, s []Sequence) { g.Policy.Kind = 3 }, ErrShape},
		"fixed split into nothing":       {func(g *Geometry, s []Sequence) { g.Policy.Kind = lean.FixedSplit }, ErrShape},
		"negative query stride":          {func(g *Geometry, s []Sequence) { g.Query.Row = -1 }, ErrShape},
		"negative output stride":         {func(g *Geometry, s []Sequence) { g.Out.Head = -1 }, ErrShape},
		"negative log-sum-exp stride":    {func(g *Geometry, s []Sequence) { g.LSE.Head = -1 }, ErrShape},
		"negative key stride":            {func(g *Geometry, s []Sequence) { g.Key.Page = -1 }, ErrShape},
		"negative value stride":          {func(g *Geometry, s []Sequence) { g.Value.Row = -1 }, ErrShape},
		"negative row":                   {func(g *Geometry, s []Sequence) { s[1].Row = -1 }, ErrShape},
		"negative queries":               {func(g *Geometry, s []Sequence) { s[1].Queries = -1 }, ErrShape},
		"negative keys":                  {func(g *Geometry, s []Sequence) { s[1].Keys = -1 }, ErrShape},
		"rows that overflow":             {func(g *Geometry, s []Sequence) { s[1].Row = math.MaxInt }, ErrShape},
		"page table too short":           {func(g *Geometry, s []Sequence) { s[0].Keys = 13 }, ErrPage},
		"no page table":                  {func(g *Geometry, s []Sequence) { s[0].Pages = nil }, ErrPage},
		"negative page":                  {func(g *Geometry, s []Sequence) { s[0].Pages[2] = -1 }, ErrPage},
		"nonsense behind the last page":  {func(g *Geometry, s []Sequence) { s[1].Keys = 0; s[1].Pages[0] = -1 }, nil},
		"no queries and so no pages":     {func(g *Geometry, s []Sequence) { s[0] = Sequence{Keys: 1000} }, nil},
		"huge LeanTiles":                 {func(g *Geometry, s []Sequence) { g.TileTokens = math.MaxInt }, nil},
		"as many workers as one can ask": {func(g *Geometry, s []Sequence) { g.Workers = math.MaxInt }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g, seqs, o := good()
			var p Plan
			if err := p.Build(g, seqs[1:]); err != nil {
				t.Fatal(err)
			}
			tiles := p.Tiles()
			c.change(&g, seqs)
			err := p.Build(g, seqs)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			if err != nil && p.Tiles() != tiles {
				t.Error("a plan that was not built has changed")
			}
			if err := Run(Default(), &p, &o); err != nil {
				t.Error("what was built does not run: ", err)
			}
		})
	}
}

func TestRunErrors(t *testing.T) {
	type geometry = Geometry
	for name, c := range map[string]struct {
		change func(*geometry, *Operands[float32])
		want   error
	}{
		"as it should be":          {func(g *geometry, o *Operands[float32]) {}, nil},
		"no log-sum-exp":           {func(g *geometry, o *Operands[float32]) { o.LSE = nil }, nil},
		"queries too short":        {func(g *geometry, o *Operands[float32]) { o.Q = o.Q[1:] }, ErrShape},
		"output too short":         {func(g *geometry, o *Operands[float32]) { o.Out = o.Out[1:] }, ErrShape},
		"log-sum-exp too short":    {func(g *geometry, o *Operands[float32]) { o.LSE = o.LSE[1:] }, ErrShape},
		"no queries":               {func(g *geometry, o *Operands[float32]) { o.Q = nil }, ErrShape},
		"keys too short":           {func(g *geometry, o *Operands[float32]) { o.K.Len-- }, ErrPage},
		"values too short":         {func(g *geometry, o *Operands[float32]) { o.V.Len-- }, ErrPage},
		"no keys":                  {func(g *geometry, o *Operands[float32]) { o.K = Buffer{} }, ErrPage},
		"nil keys":                 {func(g *geometry, o *Operands[float32]) { o.K.Ptr = nil }, ErrShape},
		"unknown dtype":            {func(g *geometry, o *Operands[float32]) { o.V.DType = 7 }, ErrDType},
		"keys and values differ":   {func(g *geometry, o *Operands[float32]) { o.V.DType = Float16 }, ErrDType},
		"unaligned values":         {func(g *geometry, o *Operands[float32]) { o.V.Ptr = unsafe.Add(o.V.Ptr, 1) }, ErrShape},
		"strides that overflow":    {func(g *geometry, o *Operands[float32]) { g.Key.Page = math.MaxInt }, ErrPage},
		"row strides that do":      {func(g *geometry, o *Operands[float32]) { g.Out.Row = math.MaxInt }, ErrShape},
		"head strides beyond":      {func(g *geometry, o *Operands[float32]) { g.Value.Head = 1000 }, ErrPage},
		"a query stride of 0":      {func(g *geometry, o *Operands[float32]) { g.Query = Strides{} }, nil},
		"a stride of 0 with pages": {func(g *geometry, o *Operands[float32]) { g.Key = PageStrides{} }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			g, seqs, o := good()
			for i := range o.Out {
				o.Out[i] = float32(untouched)
			}
			c.change(&g, &o)
			var p Plan
			if err := p.Build(g, seqs); err != nil {
				t.Fatal(err)
			}
			err := Run(Default(), &p, &o)
			if !errors.Is(err, c.want) {
				t.Fatalf("error %v, want %v", err, c.want)
			}
			for i, x := range o.Out {
				if isUntouched(x) != (err != nil) {
					t.Fatalf("error %v, and out[%d] is %v", err, i, x)
				}
			}
		})
	}
}

// The zero Plan, and a plan without rows, need no operands.
func TestRunNothing(t *testing.T) {
	var p Plan
	if err := Run(Default(), &p, &Operands[float64]{}); err != nil {
		t.Error(err)
	}
	g, _, _ := good()
	if err := p.Build(g, nil); err != nil {
		t.Fatal(err)
	}
	if err := Run(Default(), &p, &Operands[float32]{}); err != nil {
		t.Error(err)
	}
	// Rows that see nothing need no keys.
	if err := p.Build(g, []Sequence{{Queries: 1}}); err != nil {
		t.Fatal(err)
	}
	out := []float32{1, 1, 1, 1, 1, 1, 1, 1}
	if err := Run(Default(), &p, &Operands[float32]{Q: make([]float32, 12), Out: out}); err != nil {
		t.Fatal(err)
	}
	for i, x := range out {
		if x != 0 {
			t.Errorf("out[%d] = %v", i, x)
		}
	}
}

func TestSumProducts(t *testing.T) {
	for _, c := range []struct {
		got, want int
	}{
		{sumProducts(1, 2, 3, 4, 5, 6, 7), 69},
		{sumProducts(0, math.MaxInt, 1, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(1, math.MaxInt, 1, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(0, math.MaxInt, math.MaxInt, 0, 0, 0, 0), math.MaxInt},
		{sumProducts(0, 1<<31, 1<<31, 1<<31, 1<<31, 0, 0), math.MaxInt},
		{sumProducts(5, 0, math.MaxInt, math.MaxInt, 0, 0, 0), 5},
	} {
		if c.got != c.want {
			t.Errorf("got %d, want %d", c.got, c.want)
		}
	}
}
