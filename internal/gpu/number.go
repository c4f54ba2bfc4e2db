package gpu

// Ceil returns ceil(n/size) for n >= 0.
func Ceil(n, size int) int {
	if n == 0 {
		return 0
	}
	return (n-1)/size + 1
}
