// Sums of products of integers: the weights w and v by x and y, both 16, in the four lanes of d. t is for the products.
//
// Without dot products, two products of 8 bits are added in 16 bits. They fit: x is at least -127.

#define products(w, v, x, y, t, d) \
	smull(x, w, t) \
	smlal2(x, w, t) \
	saddlp(t, d) \
	smull(y, v, t) \
	smlal2(y, v, t) \
	sadalp(t, d)

#define half(w, x, t, d) \
	smull(x, w, t) \
	smlal2(x, w, t) \
	saddlp(t, d)

// The instructions of the extension FEAT_DotProd add four products at once.

#define productsDot(w, v, x, y, t, d) \
	zero(d) \
	sdot(x, w, d) \
	sdot(y, v, d)

#define halfDot(w, x, t, d) \
	zero(d) \
	sdot(x, w, d)

// add4 makes in c the vector of the four sums over the lanes of c to c+3.
#define add4(c) \
	addp((c)+1, (c)+0, (c)+0) \
	addp((c)+3, (c)+2, (c)+2) \
	addp((c)+2, (c)+0, (c)+0)
