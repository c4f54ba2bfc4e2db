package ptx

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// fault is an error of a program or of its execution.
type fault struct{ text string }

func (f fault) Error() string { return f.text }

// Kernel is an entry of a module, ready to run.
type Kernel struct {
	name         string
	code         []instruction
	n32, n64, np int // registers per thread
	c32          [][lanes]uint32
	c64          [][lanes]uint64
	static       int       // bytes of static shared memory
	dynamic      int       // offset of the launch's dynamic shared memory
	params       int       // bytes of the kernel's parameters
	frame        int       // bytes of the parameters of functions
	spare        sync.Pool // unused warps
}

// A register is its number. Registers from constant on have the same value in all threads.
type register int32

const constant register = 1 << 28

// kind is the control flow of an instruction.
type kind uint8

const (
	plain    kind = iota
	together      // needs all threads of its mask at the same time
	branch
	call
	ret
	barrier // threads may wait after it
)

// instruction is a compiled statement for a warp.
type instruction struct {
	kind    kind
	negated bool
	writes  bool     // memory
	guard   register // predicate register; -1: no guard
	do      func(w *warp, m uint32)
	mask    register                            // register with the mask, for kind together; -1: all threads
	wait    func(w *warp, m uint32) func() bool // for kind barrier; returns nil, or a function that reports whether the threads may continue
	target  int
	line    int
	text    string
}

// symbol is the meaning of a name in a scope.
type symbol struct {
	width int // register width: 1, 32 or 64; 0: no register
	reg   register
	v     *variable // variable
	at    int       // address of the variable in its space
	space space
	label int // index in labels, counted from 1; 0: no label
}

// compiler compiles a kernel.
type compiler struct {
	*Kernel
	m         *Module
	scopes    []map[string]*symbol
	labels    []int // code position of each label
	functions map[string]*compiled
	order     []*compiled
	f         *compiled
	s         *statement
	k32       map[uint32]register
	k64       map[uint64]register
	sharedAt  map[*variable]int
	placed    [2][]register // slots of the 32-bit and 64-bit registers; nil: each register has its own slot
	usage     []usage       // register usage of each instruction
}

// compiled is a function with its label and with the frame offsets of its parameters.
type compiled struct {
	*function
	label           int
	results, params []*symbol
	calls           []*compiled
	state           int // state of the recursion check
}

func align(n, to int) int { return (n + to - 1) / to * to }

// catch converts a fault into an error.
func catch(what string, err *error) {
	if r := recover(); r != nil {
		f, ok := r.(fault)
		if !ok {
			panic(r)
		}
		*err = fmt.Errorf("ptx: %s: %w", what, f)
	}
}

// Parse parses a module.
func Parse(text string) (m *Module, err error) {
	defer catch("module", &err)
	return parse(strings.TrimRight(text, "\x00")), nil
}

// Kernel compiles an entry. It compiles twice, because the slots of the registers depend on all of their
// uses.
func (m *Module) Kernel(entry string) (k *Kernel, err error) {
	defer catch(entry, &err)
	f := m.functions[entry]
	if f == nil || !f.entry {
		return nil, fmt.Errorf("ptx: there is no entry %s", entry)
	}
	f.parse(m)
	c := m.compile(f, [2][]register{})
	of, n := c.places()
	c = m.compile(f, of)
	c.n32, c.n64 = n[0], n[1]
	for i := range c.code {
		if in := &c.code[i]; in.kind == branch || in.kind == call {
			in.target = c.labels[in.target]
		}
	}
	return c.Kernel, nil
}

// compile generates the code of an entry, whose branches and calls still name labels. Each register has its
// own slot if placed is nil, or else its slot in placed.
func (m *Module) compile(f *function, placed [2][]register) *compiler {
	c := &compiler{Kernel: &Kernel{name: f.name}, m: m, functions: map[string]*compiled{}, k32: map[uint32]register{}, k64: map[uint64]register{}, sharedAt: map[*variable]int{}, placed: placed}
	c.layOut()
	c.function(f)
	for i := 0; i < len(c.order); i++ {
		c.body(c.order[i])
	}
	if c.frame > mostBytes || c.Kernel.params > mostBytes || c.dynamic > 1<<rankShift {
		c.fail("%d bytes of shared memory, %d and %d of parameters", c.static, c.Kernel.params, c.frame)
	}
	if c.order[0].recursive() { // parameters and registers have one slot each, so recursion is impossible
		c.fail("a function calls itself")
	}
	for i := range c.code {
		if in := &c.code[i]; (in.kind == branch || in.kind == call) && c.labels[in.target] < 0 {
			c.fail("a label has no place")
		}
	}
	return c
}

func (c *compiler) fail(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if c.s != nil {
		text = fmt.Sprintf("line %d: %s: %s", c.s.line, c.s.text, text)
	}
	panic(fault{text})
}

// layOut assigns addresses to shared variables. The launch's dynamic memory follows the static variables.
func (c *compiler) layOut() {
	place := func(v *variable) {
		if !v.dynamic {
			c.static = align(c.static, v.align)
			c.sharedAt[v] = sharedStart + c.static
			c.static += v.bytes
		}
	}
	for _, v := range c.m.shared {
		place(v)
	}
	for _, name := range slices.Sorted(maps.Keys(c.m.functions)) {
		if f := c.m.functions[name]; f.name == c.name || !f.entry { // functions that are never called have no shared variables in these sources
			for _, v := range f.shared {
				place(v)
			}
		}
	}
	c.dynamic = sharedStart + align(c.static, 1024)
	for _, v := range c.m.shared {
		if v.dynamic {
			c.sharedAt[v] = c.dynamic
		}
	}
}

// recursive reports whether a function calls itself, directly or indirectly.
func (f *compiled) recursive() bool {
	const under, done = 1, 2
	switch f.state {
	case under:
		return true
	case done:
		return false
	}
	f.state = under
	if slices.ContainsFunc(f.calls, (*compiled).recursive) {
		return true
	}
	f.state = done
	return false
}

func (c *compiler) newLabel() int {
	c.labels = append(c.labels, -1)
	return len(c.labels) - 1
}

// function returns the compiled function, and assigns its label and offsets on first use.
func (c *compiler) function(f *function) *compiled {
	if g := c.functions[f.name]; g != nil {
		return g
	}
	g := &compiled{function: f, label: c.newLabel()}
	place := func(v *variable) *symbol {
		at, where := &c.frame, frameSpace
		if f.entry {
			at, where = &c.Kernel.params, paramSpace
		}
		*at = align(*at, v.align)
		s := &symbol{v: v, at: *at, space: where}
		*at += v.bytes
		return s
	}
	for _, v := range f.params {
		g.params = append(g.params, place(v))
	}
	for _, v := range f.results {
		g.results = append(g.results, place(v))
	}
	c.functions[f.name] = g
	c.order = append(c.order, g)
	return g
}

func (c *compiler) push() { c.scopes = append(c.scopes, map[string]*symbol{}) }
func (c *compiler) pop()  { c.scopes = c.scopes[:len(c.scopes)-1] }

func (c *compiler) define(name string, s *symbol) { c.scopes[len(c.scopes)-1][name] = s }

func (c *compiler) find(name string) *symbol {
	for i := len(c.scopes) - 1; i >= 0; i-- {
		if s := c.scopes[i][name]; s != nil {
			return s
		}
	}
	return nil
}

var widths = map[string]int{"pred": 1, "b8": 32, "b16": 32, "u16": 32, "s16": 32, "f16": 32, "b32": 32, "u32": 32, "s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64}

func (c *compiler) newRegister(width int) register {
	n := map[int]*int{1: &c.np, 32: &c.n32, 64: &c.n64}[width]
	if *n++; *n > mostRegisters {
		c.fail("more than %d registers", mostRegisters)
	}
	if placed := c.placed[width/64]; width > 1 && placed != nil {
		return placed[*n-1]
	}
	return register(*n - 1)
}

func (c *compiler) body(f *compiled) {
	c.f = f
	c.scopes = nil
	c.push()
	for _, v := range c.m.shared {
		c.define(v.name, &symbol{v: v, at: c.sharedAt[v], space: sharedSpace})
	}
	for _, v := range f.shared {
		c.define(v.name, &symbol{v: v, at: c.sharedAt[v], space: sharedSpace})
	}
	for i, v := range f.function.params {
		c.define(v.name, f.params[i])
	}
	for i, v := range f.function.results {
		c.define(v.name, f.results[i])
	}
	c.labels[f.label] = len(c.code)
	// Labels may be used before their declaration.
	declare := func(from int) {
		depth := 0
		for i := from; i < len(f.body) && depth >= 0; i++ {
			switch s := &f.body[i]; {
			case s.open:
				depth++
			case s.end:
				depth--
			case s.label != "" && depth == 0:
				c.define(s.label, &symbol{label: c.newLabel() + 1})
			}
		}
	}
	declare(0)
	for i := range f.body {
		s := &f.body[i]
		c.s = s
		switch {
		case s.open:
			c.push()
			declare(i + 1)
		case s.end:
			c.pop()
		case s.label != "":
			at := c.find(s.label).label
			if at == 0 || c.labels[at-1] >= 0 {
				c.fail("a second %s", s.label)
			}
			c.labels[at-1] = len(c.code)
		case s.registers != nil:
			width, ok := widths[s.registers.kind]
			if !ok {
				c.fail("registers of this kind")
			}
			for i, name := range s.registers.names {
				if s.registers.counts[i] == 0 {
					c.define(name, &symbol{width: width, reg: c.newRegister(width)})
				}
				for j := range s.registers.counts[i] {
					c.define(name+strconv.Itoa(j), &symbol{width: width, reg: c.newRegister(width)})
				}
			}
		case s.variable != nil:
			if s.variable.space != "param" {
				c.fail("memory of this space")
			}
			c.frame = align(c.frame, s.variable.align)
			c.define(s.variable.name, &symbol{v: s.variable, at: c.frame, space: frameSpace})
			c.frame += s.variable.bytes
		case s.op != nil:
			c.instruction(s)
		}
	}
	c.emit(instruction{kind: ret, guard: -1}) // a label may be at the end
	c.s = nil
}

func (c *compiler) emit(in instruction) {
	if c.s != nil {
		in.line, in.text = c.s.line, c.s.text
	}
	c.code = append(c.code, in)
	if c.placed[0] == nil {
		c.usage = append(c.usage, c.use())
	}
}

func (c *compiler) symbol(o *operand) *symbol {
	s := c.find(o.word)
	if s == nil {
		c.fail("%s is not declared", o.word)
	}
	return s
}

// dst returns the register that an operand names.
func (c *compiler) dst(o *operand, width int) register {
	s := c.symbol(o)
	if s.width != width {
		c.fail("%s has %d bits, not %d", o.word, s.width, width)
	}
	return s.reg
}

func (c *compiler) predicate(o *operand) register { return c.dst(o, 1) }

// number returns the bits of an immediate operand. A decimal fraction is converted to the given width.
func (c *compiler) number(word string, width int) (bits uint64, ok bool) {
	sign := ""
	if strings.HasPrefix(word, "-") {
		sign, word = "-", word[1:]
	}
	if word == "" || word[0] < '0' || word[0] > '9' {
		return 0, false
	}
	switch {
	case strings.HasPrefix(word, "0f") || strings.HasPrefix(word, "0F"):
		n, err := strconv.ParseUint(word[2:], 16, 32)
		if err != nil {
			c.fail("%v", err)
		}
		if sign != "" {
			n ^= 1 << 31
		}
		return n, true
	case strings.HasPrefix(word, "0d") || strings.HasPrefix(word, "0D"):
		n, err := strconv.ParseUint(word[2:], 16, 64)
		if err != nil {
			c.fail("%v", err)
		}
		if sign != "" {
			n ^= 1 << 63
		}
		return n, true
	}
	word = strings.TrimSuffix(word, "U")
	if strings.Contains(word, ".") {
		x, err := strconv.ParseFloat(sign+word, 64)
		if err != nil {
			c.fail("%v", err)
		}
		if width == 64 {
			return math.Float64bits(x), true
		}
		return uint64(math.Float32bits(float32(x))), true
	}
	n, err := strconv.ParseUint(word, 0, 64)
	if err != nil {
		c.fail("%v", err)
	}
	if sign != "" {
		n = -n
	}
	return n, true
}

func (c *compiler) constant32(x uint32) register { return constantOf(&c.c32, c.k32, x) }
func (c *compiler) constant64(x uint64) register { return constantOf(&c.c64, c.k64, x) }

// constantOf returns the register of a constant. Equal constants share a register.
func constantOf[T word](numbers *[][lanes]T, known map[T]register, x T) register {
	r, ok := known[x]
	if !ok {
		r = constant + register(len(*numbers))
		var each [lanes]T
		for i := range each {
			each[i] = x
		}
		*numbers = append(*numbers, each)
		known[x] = r
	}
	return r
}

// src32 and src64 return the registers of source operands.
func (c *compiler) src32(o *operand) register {
	if n, ok := c.number(o.word, 32); ok {
		return c.constant32(uint32(n))
	}
	s := c.symbol(o)
	if s.v != nil {
		if s.space == frameSpace {
			c.fail("the address of a function's parameter")
		}
		return c.constant32(uint32(s.at))
	}
	return c.dst(o, 32)
}

func (c *compiler) src64(o *operand) register {
	if n, ok := c.number(o.word, 64); ok {
		return c.constant64(n)
	}
	s := c.symbol(o)
	if s.v != nil {
		if s.space == frameSpace {
			c.fail("the address of a function's parameter")
		}
		return c.constant64(uint64(s.at))
	}
	return c.dst(o, 64)
}

// address is the address of an operand in brackets: a register plus an offset, in 64 bits.
type address struct {
	wide   bool
	reg    register
	offset uint64
	space  space
}

func (c *compiler) address(o *operand, where space) address {
	if !o.memory {
		c.fail("no address")
	}
	a := address{offset: uint64(o.offset), space: where, reg: -1}
	if n, ok := c.number(o.word, 64); ok {
		a.offset += n
		return a
	}
	s := c.symbol(o)
	switch {
	case s.v != nil:
		a.offset += uint64(s.at)
		a.space = s.space
		if where != s.space && !(where == paramSpace && s.space == frameSpace) && !(where == clusterSpace && s.space == sharedSpace) {
			c.fail("%s is in another space", o.word)
		}
	case s.width == 64:
		a.wide, a.reg = true, s.reg
	case s.width == 32:
		a.reg = s.reg
	default:
		c.fail("%s is no address", o.word)
	}
	return a
}

// at returns a lane's address.
func (a *address) at(w *warp, lane int) uint64 {
	switch {
	case a.reg < 0:
		return a.offset
	case a.wide:
		return w.q(a.reg)[lane] + a.offset
	}
	return uint64(w.d(a.reg)[lane]) + a.offset
}

// has reports whether the instruction's name has a part.
func (s *statement) has(part string) bool {
	for _, p := range s.op {
		if p == part {
			return true
		}
	}
	return false
}

func (s *statement) kind() string { return s.op[len(s.op)-1] }

func (c *compiler) need(n int) {
	if len(c.s.args) != n {
		c.fail("%d operands, want %d", len(c.s.args), n)
	}
}

func (c *compiler) least(n int) {
	if len(c.s.args) < n {
		c.fail("%d operands, want %d", len(c.s.args), n)
	}
}

// part returns part i of the instruction's name, or "" if the name has fewer parts.
func (s *statement) part(i int) string {
	if i < 0 || i >= len(s.op) {
		return ""
	}
	return s.op[i]
}

// constantArgument returns the value of an operand that must be a number.
func (c *compiler) constantArgument(i int) int {
	c.least(i + 1)
	n, ok := c.number(c.s.args[i].word, 64)
	if !ok {
		c.fail("operand %d is no number", i)
	}
	if n > 1<<20 {
		c.fail("operand %d is too large, or negative", i)
	}
	return int(int64(n))
}

// ParamBytes returns the size of an entry's parameters.
func (m *Module) ParamBytes(entry string) (n int, err error) {
	f := m.functions[entry]
	if f == nil || !f.entry {
		return 0, fmt.Errorf("ptx: there is no entry %s", entry)
	}
	for _, v := range f.params {
		n = align(n, v.align) + v.bytes
	}
	return n, nil
}

// Entries returns the names of all entries in ascending order.
func (m *Module) Entries() (names []string) {
	for _, name := range slices.Sorted(maps.Keys(m.functions)) {
		if m.functions[name].entry {
			names = append(names, name)
		}
	}
	return names
}

// ParamBytes returns the size of the kernel's parameters.
func (k *Kernel) ParamBytes() int { return k.params }
